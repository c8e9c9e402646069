"""`scalesim`: SCALE-Sim's command line, and tables of layers."""

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stablecast.cli import options as opt
from stablecast.cli.app import app
from stablecast.ir.errors import InputError, near_names

if TYPE_CHECKING:
    from stablecast.backends.systolic import Compat, LayerKind, LayerReport, RunResult

_CORRECTED = "corrected"
_SAVE_WORDS = ("Y", "N")


@app.command(context_settings={"allow_extra_args": True})
def scalesim(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("-c", "--config", metavar="CFG", help="SCALE-Sim's .cfg.")] = None,
    topology: Annotated[
        Path | None, typer.Option("-t", "--topology", metavar="CSV", help="SCALE-Sim's topology, conv or gemm.")
    ] = None,
    kind: Annotated[
        str, typer.Option("-i", "--input-type", help="conv or gemm; without it the topology's header decides.")
    ] = "",
    layout: Annotated[
        Path | None, typer.Option("-l", "--layout", metavar="CSV", help="SCALE-Sim's layout, for custom layouts.")
    ] = None,
    save: Annotated[
        bool, typer.Option("-s", "--save-traces", help="Write the six SRAM and DRAM traces of each layer.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-p", "--path", metavar="FOLDER", help="Reports go to FOLDER/<run_name>/.")
    ] = None,
    compat: Annotated[
        str,
        typer.Option(help="scalesim-3.0 for SCALE-Sim's own numbers (default of --table), or corrected (else)."),
    ] = "",
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=1, help="Layers that run side by side.")] = 1,
    table: Annotated[
        Path | None, typer.Option("--table", metavar="ROWS", help="CSV with a layer and its array a row.")
    ] = None,
    table_output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="CSV", help="Where the computed table goes.")
    ] = None,
    json: opt.Json = False,
) -> None:
    """Cycles, stalls and traffic of layers on one systolic array, under SCALE-Sim's file formats.

    stablecast scalesim -c google.cfg -t resnet18.csv -p out/ [--compat scalesim-3.0]
    """
    mode = _mode(compat)
    saving = _saving(save, context.args)
    if table is not None:
        _require("--table", {"-o": table_output})
        assert table_output is not None
        _clash({"-c": config, "-t": topology, "-p": output, "-l": layout, "-i": kind or None, "-s": save or None})
        rows = _table(table, table_output, "scalesim-3.0" if not compat else mode)
        _say(json, {"schema": 1, "output": str(table_output), "rows": rows}, f"{table_output}: {rows} rows")
        return
    _require("scalesim", {"-c": config, "-t": topology, "-p": output})
    _clash({"-o": table_output})
    assert config is not None
    assert topology is not None
    assert output is not None
    from stablecast.backends.systolic import run

    if saving and mode is None:
        raise InputError("-s writes SCALE-Sim's traces, which the corrected mode lacks", "add --compat scalesim-3.0")
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file", "give -p a folder")
    with opt.progress(f"running {topology}"):
        result = run(config, topology, output, layout=layout, kind=_kind(kind), compat=mode, traces=saving, jobs=jobs)
    _say(json, _run_dict(result, mode), _run_text(result))


def _mode(compat: str) -> "Compat | None":
    from stablecast.backends.systolic import COMPAT

    if compat in ("", _CORRECTED):
        return None
    if compat != COMPAT:
        raise InputError(f"unknown --compat '{compat}'", near_names(compat, (COMPAT, _CORRECTED)))
    return COMPAT


def _kind(text: str) -> "LayerKind | None":
    if text == "conv":
        return "conv"
    if text == "gemm":
        return "gemm"
    if text:
        raise InputError(f"unknown -i '{text}'", "known: conv, gemm")
    return None


def _saving(asked: bool, words: list[str]) -> bool:
    """SCALE-Sim writes `-s Y` or `-s N`; a plain `-s` means yes."""
    if words and not (asked and len(words) == 1 and words[0] in _SAVE_WORDS):
        raise InputError(f"unexpected '{' '.join(words)}'", "options only: -c CFG -t TOPOLOGY -p FOLDER")
    return asked and words != ["N"]


def _require(what: str, values: dict[str, Any]) -> None:
    missing = [flag for flag, value in values.items() if value is None]
    if missing:
        raise InputError(f"{what} needs {', '.join(missing)}", "see stablecast scalesim --help")


def _clash(values: dict[str, Any]) -> None:
    given = [flag for flag, value in values.items() if value is not None]
    if given:
        raise InputError(f"{', '.join(given)} does not go with this form", "either -c, -t, -p or --table, -o")


def _table(rows: Path, output: Path, mode: "Compat | None") -> int:
    from stablecast.backends.systolic import evaluate_table

    return evaluate_table(rows, opt.writable(output), compat=mode)


def _say(json: bool, answer: dict[str, Any], text: str) -> None:
    typer.echo(jsonlib.dumps(answer) if json else text)


def _run_dict(result: "RunResult", mode: "Compat | None") -> dict[str, Any]:
    return {
        "schema": 1,
        "mode": mode or _CORRECTED,
        "total_cycles": result.total_cycles,
        "layers": [_layer_dict(layer) for layer in result.layers],
        "files": [str(file) for file in result.files],
        "notes": list(result.notes),
    }


def _layer_dict(layer: "LayerReport") -> dict[str, Any]:
    return {
        "name": layer.name,
        "total_cycles": layer.total_cycles,
        "stall_cycles": layer.stall_cycles,
        "overall_util": layer.overall_util,
        "mapping_eff": layer.mapping_eff,
        "compute_util": layer.compute_util,
    }


def _run_text(result: "RunResult") -> str:
    from stablecast.ir.text import table

    rows = [("layer", "cycles", "stalls", "utilisation", "mapping")]
    rows += [
        (
            layer.name,
            f"{layer.total_cycles:,}",
            f"{layer.stall_cycles:,}",
            f"{layer.overall_util:.1f} %",
            f"{layer.mapping_eff:.1f} %",
        )
        for layer in result.layers
    ]
    folders = dict.fromkeys(str(file.parent) for file in result.files)
    lines = [*table(rows, right=(1, 2, 3, 4), indent="  "), "", f"  {result.total_cycles:,} cycles in all"]
    lines += [f"  note: {note}" for note in result.notes]
    return "\n".join([*lines, *(f"  written to {folder}" for folder in list(folders)[:1])])
