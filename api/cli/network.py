"""`collective` and `simulate`: the network alone, and Chakra traces through it."""

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stablecast.cli import options as opt
from stablecast.cli.app import app
from stablecast.ir.errors import InputError, near_names

if TYPE_CHECKING:
    from stablecast.backends.astrasim import CollectiveCycles
    from stablecast.backends.astrasim.config import Backend

_MODES = ("calibrated", "astra-sim")
_BACKENDS = ("congestion_unaware", "congestion_aware")
_KINDS = {"broadcast": "collective_broadcast", "permute": "collective_permute"} | dict.fromkeys(
    ("send", "recv", "receive", "send_recv"), "collective_permute"
)

NetworkFile = Annotated[
    Path | None,
    typer.Option("--network", "--network-configuration", metavar="FILE", help="ASTRA-sim's network.yml."),
]
SystemFile = Annotated[
    Path | None, typer.Option("--system", "--system-configuration", metavar="FILE", help="ASTRA-sim's system.json.")
]
GroupFile = Annotated[
    Path | None,
    typer.Option(
        "--group-file", "--comm-group-configuration", metavar="FILE", help='Communicator groups: {"1": [0, 1], ...}.'
    ),
]
NetworkBackend = Annotated[str, typer.Option("--backend", help="congestion_unaware or congestion_aware.")]
On = Annotated[str, typer.Option("--on", metavar="NAME[:N]", help="A system of the catalogue or a YAML file.")]


def _backend(name: str) -> "Backend":
    if name not in _BACKENDS:
        raise InputError(f"unknown backend '{name}'", near_names(name, _BACKENDS))
    return name


def _groups(path: Path | None) -> list[list[int]] | None:
    from stablecast.ir.chakra import read_comm_groups

    if path is None or "empty" in str(path):
        return None
    found = read_comm_groups(path)
    if found.problems:
        raise InputError(f"{path}: {found.problems[0]}")
    return [list(members) for members in found.members.values()]


def _flags(text: str) -> list[bool] | None:
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if any(part not in ("0", "1") for part in parts):
        raise InputError(f"--involved-dim '{text}' is not a list of 0 and 1", "one flag a network dimension: 1,0")
    return [part == "1" for part in parts]


@app.command()
def collective(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, permute, send, recv."
        ),
    ] = "",
    size: Annotated[
        str,
        typer.Option(
            "--bytes",
            metavar="N",
            help="One device's operand, 1048576 or 1MiB. all_gather: its result, in the mode astra-sim what a rank "
            "contributes.",
        ),
    ] = "",
    network: NetworkFile = None,
    system: SystemFile = None,
    group_file: GroupFile = None,
    involved_dim: Annotated[str, typer.Option("--involved-dim", help="One flag a network dimension: 1,0.")] = "",
    backend: NetworkBackend = "congestion_unaware",
    mode: Annotated[str, typer.Option("--mode", help="calibrated (with --on), or astra-sim.")] = "",
    on: On = "",
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="Devices of --on that take part; a machine's own if left out.")
    ] = None,
    algorithm: Annotated[
        str,
        typer.Option("--algorithm", help="ring, direct, halving-doubling, double-binary-tree, in-network (nvls), ..."),
    ] = "auto",
    table: Annotated[Path | None, typer.Option("--table", help="CSV with a row a collective (astra-sim).")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the table goes; standard output if left out.")
    ] = None,
    json: opt.Json = False,
) -> None:
    """The time of one collective, or of a table of them.

    stablecast collective all_reduce --bytes 1048576 --on h100-sxm --ranks 8
    """
    chosen = mode or ("astra-sim" if network or table else "calibrated")
    if chosen not in _MODES:
        raise InputError(f"unknown mode '{mode}'", near_names(chosen, _MODES))
    if table is not None:
        _table(table, chosen, output)
        return
    if not kind or not size:
        raise InputError("collective needs a kind and a size", "all_reduce --bytes 1048576")
    nbytes = _nbytes(size)
    if chosen == "astra-sim":
        from stablecast.backends.astrasim import collective_cycles

        net, sys = _configuration("--mode astra-sim", network, system, _sized(on, ranks) if on else "", False)
        answer = collective_cycles(kind, nbytes, net, sys, _groups(group_file), _flags(involved_dim), _backend(backend))
        _say_cycles(answer, json)
    else:
        _calibrated(kind, nbytes, on, ranks, algorithm, json)


def _table(table: Path, mode: str, output: Path | None) -> None:
    from stablecast.backends.astrasim import collective_table

    if mode != "astra-sim":
        raise InputError("--table takes --mode astra-sim")
    try:
        text = table.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{table}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    answer = collective_table(text, str(table))
    if output is None:
        typer.echo(answer.rstrip())
    else:
        opt.write_text(output, answer)


def _say_cycles(answer: "CollectiveCycles", json: bool) -> None:
    if json:
        typer.echo(jsonlib.dumps(answer.to_dict()))
    elif answer.cycles_min == answer.cycles_max:
        typer.echo(f"{answer.cycles_max:,} cycles on every rank (1 cycle = 1 ns)")
    else:
        typer.echo(f"{answer.cycles_min:,} to {answer.cycles_max:,} cycles by rank (1 cycle = 1 ns)")


def _nbytes(text: str) -> int:
    """Bytes of "1048576" or "1 MiB"."""
    from stablecast.backends import units

    value, dimension = units.to_si(*units.parse(text))
    if dimension not in (units.BYTES, units.COUNT) or value < 0 or value != int(value):
        raise InputError(f"--bytes '{text}' is not a number of bytes", "write for example 1048576 or 1MiB")
    return int(value)


def _sized(on: str, ranks: int | None) -> str:
    """`on` with its number of devices: `ranks` where it has none, else as many as the machine has."""
    from stablecast.backends.catalogue import Catalogue, split_count

    name, given = split_count(on)
    count = given or ranks or Catalogue().resolve(name).count
    if count == 1 and not given and ranks is None:
        raise InputError(f"{on}: how many devices take part?", "give --ranks 8")
    return f"{name}:{count}"


def _calibrated(kind: str, nbytes: int, on: str, ranks: int | None, algorithm: str, json: bool) -> None:
    import numpy as np

    from stablecast.backends.catalogue import Catalogue, split_count
    from stablecast.backends.collectives import CollectiveModel
    from stablecast.ir.groups import all_devices

    if not on:
        raise InputError("collective needs a system", "give --on h100-sxm --ranks 8, or --mode astra-sim --network ...")
    system = Catalogue().resolve(_sized(on, ranks))
    count = ranks or split_count(on)[1] or system.count
    plain = kind.replace("-", "_").lower()
    model = CollectiveModel(system, algorithm.replace("_", "-").lower())
    time, low, high, chosen = model.times(_KINDS.get(plain, plain), all_devices(count), np.array([float(nbytes)]))
    answer = {"time_s": float(time[0]), "low_s": float(low[0]), "high_s": float(high[0]), "algorithm": chosen}
    if json:
        typer.echo(jsonlib.dumps(answer))
    else:
        from stablecast.backends import units

        shown = [units.show(float(value[0]), "s") for value in (time, low, high)]
        typer.echo(f"{plain} of {nbytes:,} bytes over {count} on {system.name}: {shown[0]} ({shown[1]} to {shown[2]})")
        typer.echo(f"algorithm: {chosen}")


@app.command()
def simulate(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="DIR/name of name.<rank>.et.")] = "",
    network: NetworkFile = None,
    system: SystemFile = None,
    memory: Annotated[
        Path | None,
        typer.Option("--memory", "--remote-memory-configuration", metavar="FILE", help="ASTRA-sim's memory.json."),
    ] = None,
    group_file: GroupFile = None,
    backend: NetworkBackend = "congestion_unaware",
    on: On = "",
    roofline: Annotated[
        bool, typer.Option("--roofline", help="With --on: time compute nodes by num_ops and tensor_size.")
    ] = False,
    log: Annotated[
        Path | None, typer.Option("--log", help="Write when each node began and ended, for Chakra's visualiser.")
    ] = None,
    workload: Annotated[
        str, typer.Option("--workload-configuration", metavar="PREFIX", help="ASTRA-sim's spelling of PREFIX.")
    ] = "",
    logging_folder: Annotated[
        Path | None,
        typer.Option("--logging-folder", help="ASTRA-sim's spelling: --log FOLDER/log.log, made if absent."),
    ] = None,
    queues: Annotated[int, typer.Option("--num-queues-per-dim", help="Only 1 is modelled.")] = 1,
    comm_scale: Annotated[float, typer.Option("--comm-scale", help="Only 1 is modelled.")] = 1.0,
    injection_scale: Annotated[float, typer.Option("--injection-scale", help="Only 1 is modelled.")] = 1.0,
    rendezvous: Annotated[str, typer.Option("--rendezvous-protocol", help="Only false is modelled.")] = "false",
    json: opt.Json = False,
) -> None:
    """Chakra traces of all ranks through a network: what ASTRA-sim's analytical backend answers for the same files."""
    from stablecast.backends.astrasim import simulate as run_simulation

    fixed = {"--num-queues-per-dim": queues, "--comm-scale": comm_scale, "--injection-scale": injection_scale}
    for flag, value in fixed.items():
        if value != 1:
            raise InputError(f"{flag} {value:g} is not modelled", "leave it at 1")
    if rendezvous not in ("false", "0"):
        raise InputError("the rendezvous protocol is not modelled", "leave it at false")
    source = prefix or workload
    if not source:
        raise InputError("simulate needs traces", "give the PREFIX of PREFIX.<rank>.et")
    target = log or (logging_folder / "log.log" if logging_folder else None)
    if target is not None and (log or target.parent.exists()):
        opt.writable(target)
    net, sys = _configuration("simulate", network, system, on, roofline)
    with opt.progress(f"simulating {source}"):
        result = run_simulation(source, net, sys, memory, group_file, _backend(backend), events=target is not None)
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        opt.write_text(target, result.log_text())
    typer.echo(jsonlib.dumps(result.to_dict()) if json else repr(result))


_ALONE = {"topology": ["FullyConnected"], "npus_count": [1], "bandwidth": [1.0], "latency": [0.0]}
"""A trace of one rank needs no network; the simulator wants one."""


def _configuration(what: str, network: Path | None, system: Path | None, on: str, roofline: bool) -> tuple[Any, Any]:
    if not on:
        if network is None or system is None:
            raise InputError(f"{what} needs --network and --system", "or --on h100-sxm:8 for both")
        return network, system
    from stablecast.backends.astrasim.files import network_dict, system_dict
    from stablecast.backends.catalogue import Catalogue

    found = Catalogue().resolve(on)
    alone = _ALONE if found.count == 1 and what == "simulate" else None
    return network or alone or network_dict(found), system or system_dict(found, roofline=roofline)
