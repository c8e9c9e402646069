"""The house stands: packages are listed, imports point one way, help is quick, the face is what it was."""

import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

import stablecast
from stablecast.backends.registry import backend_names
from stablecast.cli.app import _load_commands, app
from stablecast.ir.errors import InputError, StablecastError, near_names

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"stablecast": "api", "stablecast.report": "api/report", "stablecast.cli": "api/cli"}
FOLDERS = ("api", "frontends", "ir", "lowering", "backends", "validation")


def folders_with_code() -> dict[str, Path]:
    """Package name -> folder, by the package map."""
    found: dict[str, Path] = {}
    for room in FOLDERS:
        for init in sorted((ROOT / room).rglob("__init__.py")):
            parts = init.parent.relative_to(ROOT).parts
            name = ".".join(("stablecast", *(parts[1:] if parts[0] == "api" else parts)))
            found[name] = init.parent
    return found


def test_every_folder_with_code_is_a_listed_package() -> None:
    """A missing line works with an editable install and is missing from a plain one."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(folders_with_code())
    for name, folder in folders_with_code().items():
        assert not list(folder.glob("*.py")) or name in listed


def test_no_folder_called_stablecast_stands_at_the_root() -> None:
    assert not (ROOT / "stablecast").exists()


def test_lower_rooms_never_import_the_public_face() -> None:
    graph = grimp.build_graph("stablecast", include_external_packages=False, cache_dir=None)
    face = {"stablecast", "stablecast.cli", "stablecast.report"}
    for module in graph.modules:
        room = module.split(".")[1] if "." in module else ""
        if room in ("ir", "lowering", "frontends", "backends", "validation"):
            assert not graph.find_modules_directly_imported_by(module) & face, module


def test_importing_the_package_is_cheap() -> None:
    code = "import stablecast, sys; print(sorted({'jax', 'numpy', 'pydantic', 'rich', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_imports_nothing_heavy() -> None:
    code = "from stablecast.cli.app import _run, _load_commands; _load_commands(); _run(['--help']); import sys; print(sorted({'jax', 'jaxlib', 'numpy', 'sklearn', 'torch', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


def test_module_entry_point() -> None:
    done = subprocess.run([sys.executable, "-m", "stablecast", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"stablecast {stablecast.__version__}\n"


def test_everything_public_is_there_and_documented() -> None:
    for name in stablecast.__all__:
        value = getattr(stablecast, name)
        assert name == "__version__" or value.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = stablecast.nothing
    assert set(stablecast.__all__) <= set(dir(stablecast))


def test_every_module_says_what_it_is_for() -> None:
    for folder in folders_with_code().values():
        for path in folder.glob("*.py"):
            if not path.name.endswith("_pb2.py"):
                assert path.read_text().lstrip().startswith('"""'), path


def test_commands_do_not_appear_or_vanish_unannounced() -> None:
    _load_commands()
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    groups = {group.name for group in app.registered_groups}
    listed = {"predict", "compare", "capture", "run", "work", "ops", "kernel"}
    assert listed <= commands
    assert "hardware" in groups


def test_built_in_backends_are_entry_points() -> None:
    assert "analytical" in backend_names()


def test_errors_know_their_exit_code_and_say_what_to_do() -> None:
    error = InputError("no such thing", "try another")
    assert isinstance(error, StablecastError)
    assert (str(error), error.exit_code) == ("no such thing; try another", 2)
    assert near_names("h100sxm", ["h100-sxm", "a100-sxm"]).startswith("did you mean h100-sxm")
    assert near_names("zzz", ["a", "b"]) == "known: a, b"
