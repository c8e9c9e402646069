"""Passes from the typed program to the program of one device."""
