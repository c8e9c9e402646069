"""The hardware catalogue: one YAML file a device, one a system family, and the code that reads them."""
