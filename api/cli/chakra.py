"""`chakra INPUT` and `chakra from-trace` write traces; `chakra check | show | stats | json | diff` look at them."""

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stablecast.cli import options as opt
from stablecast.cli.app import app
from stablecast.ir.errors import InputError

_WRITE = "write"


class _InputOrCommand(TyperGroup):
    """A first word that is no command is the INPUT of `chakra INPUT`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [_WRITE, *args]
        return super().parse_args(ctx, args)


chakra = typer.Typer(
    name="chakra",
    cls=_InputOrCommand,
    help="Chakra execution traces: 'chakra INPUT -o DIR/prefix' writes those of all ranks.",
    no_args_is_help=True,
    subcommand_metavar="INPUT | COMMAND [ARGS]...",
)
app.add_typer(chakra)

Prefix = Annotated[str, typer.Argument(metavar="PREFIX", help="DIR/name of name.<rank>.et, a folder, or a file.")]
Rank = Annotated[int | None, typer.Option("--rank", help="Rank; the lowest there is unless given.")]
Groups = Annotated[Path | None, typer.Option("--group-file", help="Groups; found beside the trace unless given.")]
Out = Annotated[Path | None, typer.Option("--output", "-o", help="Write to a file instead.")]


@chakra.command(_WRITE)
@opt.grouped
def write(
    input: Annotated[str, typer.Argument(metavar="INPUT", help="As of predict, or a Chakra prefix to write anew.")],
    output: Annotated[str, typer.Option("--output", "-o", help="DIR/prefix of the files.")],
    on: Annotated[str, typer.Option("--on", metavar="NAME", help="System whose times fill the durations.")] = "",
    ranks: Annotated[int | None, typer.Option("--ranks", help="Ranks; must be the program's own number.")] = None,
    max_unroll: Annotated[int | None, typer.Option("--max-unroll", help="Trips of a loop to write out.")] = None,
    memory: Annotated[str, typer.Option("--memory", help="Memory nodes: none, step or kernel.")] = "none",
    order: Annotated[
        str, typer.Option("--order", help="Dependencies: data, or stream (those of streams too).")
    ] = "data",
    collective: Annotated[
        list[str], typer.Option("--collective", help="all_reduce=ring.xml: MSCCL XML or a graph's PREFIX@BYTES.")
    ] = [],
    roofline: Annotated[bool, typer.Option("--roofline", help="Leave the time of compute to the consumer.")] = False,
    tar: Annotated[bool, typer.Option("--tar", help="One tar file (compressed where -o ends in .tar.gz).")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing, only count.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
    backend: opt.Backend = "analytical",
    source: opt.SourceChoices = opt.SourceChoices(),
    counting: opt.CountingChoices = opt.CountingChoices(),
    execution: opt.ExecutionChoices = opt.ExecutionChoices(),
    passes: opt.Passes = [],
    json: opt.Json = False,
) -> None:
    """Write the traces of every rank, groups, ASTRA-sim's configuration and a manifest. 'write' may be left out."""
    from stablecast._chakra import ChakraOptions, write_chakra
    from stablecast._predict import Session

    if tar and dry_run:
        raise InputError("--tar and --dry-run exclude each other")
    timeline = opt.TimelineChoices(passes=passes)
    session = Session(input, opt.make_options(source, counting, execution, backend, timeline=timeline))
    chosen = ChakraOptions(
        overwrite=overwrite,
        target="tar" if tar else "dry-run" if dry_run else "files",
        memory=memory,
        order=order,
        max_unroll=max_unroll,
        roofline=roofline,
        collectives=_pairs(collective),
    )
    with opt.progress(f"writing {output}"):
        report = write_chakra(session, output, on=on, ranks=ranks, options=chosen)
    typer.echo(jsonlib.dumps({"schema": 1, **report.to_dict()}) if json else str(report))


@chakra.command("from-trace")
def from_trace(
    host: Annotated[str, typer.Argument(metavar="HOST_ET", help="PyTorch execution trace; {rank} for all ranks'.")],
    kineto: Annotated[str, typer.Argument(metavar="KINETO", help="Kineto trace of the same run; {rank} likewise.")],
    output: Annotated[str, typer.Option("--output", "-o", help="DIR/prefix of the files.")],
    on: Annotated[
        str, typer.Option("--on", metavar="NAME:N", help="System whose network and system files are written too.")
    ] = "",
    ranks: Annotated[int | None, typer.Option("--ranks", help="Ranks of the run, where the traces do not say.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
    json: opt.Json = False,
) -> None:
    """Link a measured run's host and device traces into Chakra traces of all ranks, with measured durations.

    Host operators, kernels and collectives with their dependencies: thread and stream order, launches, waits between
    streams and of the host for the device. Of a run of N ranks of which one is given, every rank gets its graph.
    """
    from stablecast._chakra import chakra_from_traces

    with opt.progress(f"linking {host}"):
        report = chakra_from_traces(host, kineto, output, on=on, ranks=ranks, overwrite=overwrite)
    typer.echo(jsonlib.dumps({"schema": 1, **report.to_dict()}) if json else str(report))


def _pairs(texts: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        kind, equals, source = text.partition("=")
        if not equals or not kind or not source:
            raise InputError(f"--collective '{text}' is not kind=file", "write all_reduce=ring.xml")
        found[kind.replace("-", "_")] = source
    return found


@chakra.command()
def check(
    prefix: Prefix,
    group_file: Groups = None,
    ranks: Annotated[int | None, typer.Option("--ranks", help="How many ranks there should be.")] = None,
    roofline: Annotated[
        bool | None, typer.Option("--roofline/--durations", help="How compute is timed, where system.json is silent.")
    ] = None,
    json: opt.Json = False,
) -> None:
    """What a consumer of the traces would choke on. Leaves with 2 where there is a fault."""
    from stablecast.ir.chakra import check as check_traces

    with opt.progress(f"checking {prefix}"):
        report = check_traces(prefix, group_file=group_file, ranks=ranks, roofline=roofline)
    typer.echo(jsonlib.dumps(report.to_json()) if json else str(report))
    if not report.ok:
        raise typer.Exit(2)


@chakra.command()
def show(
    prefix: Prefix,
    rank: Rank = None,
    start: Annotated[int, typer.Option("--start", help="First node of the table.")] = 0,
    limit: Annotated[int, typer.Option("--limit", help="Nodes to show, 0 for all.")] = 50,
    dot: Annotated[bool, typer.Option("--dot", help="The graph in DOT.")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="The graph as a picture.")] = False,
    output: Out = None,
    json: opt.Json = False,
) -> None:
    """One rank's nodes as a table, or as a graph (--dot, --svg)."""
    from stablecast.ir.chakra import trace_dot, trace_json, trace_svg, trace_table

    if dot + svg + json > 1:
        raise InputError("--dot, --svg and --json exclude each other")
    most = limit or None
    if json:
        text = "".join(trace_json(prefix, rank)).rstrip()
    elif dot or svg:
        text = (trace_dot if dot else trace_svg)(prefix, rank, limit=most)
    else:
        text = trace_table(prefix, rank, start=start, limit=most)
    _print_or_write(text, output)


def _print_or_write(text: str, output: Path | None) -> None:
    if output is None:
        typer.echo(text)
    else:
        opt.write_text(output, text + "\n")


@chakra.command()
def stats(prefix: Prefix, group_file: Groups = None, json: opt.Json = False) -> None:
    """Counts over all ranks: nodes, work, collectives by type and group size."""
    from stablecast.ir.chakra import trace_stats

    with opt.progress(f"reading {prefix}"):
        found = trace_stats(prefix, group_file=group_file)
    typer.echo(jsonlib.dumps(found.to_json()) if json else str(found))


@chakra.command("json")
def as_json(prefix: Prefix, rank: Rank = None, output: Out = None) -> None:
    """One rank as a JSON document, which reads back to the same graph."""
    from stablecast.ir.chakra import trace_json

    _print_or_write("".join(trace_json(prefix, rank)).rstrip(), output)


@chakra.command()
def diff(
    left: Annotated[str, typer.Argument(metavar="A", help="A prefix or file.")],
    right: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    limit: Annotated[int, typer.Option("--limit", help="Differences to list.")] = 100,
    json: opt.Json = False,
) -> None:
    """What differs between two traces, node by node. Leaves with 2 where anything does."""
    from stablecast.ir.chakra import diff_traces

    found = diff_traces(left, right, limit=limit)
    typer.echo(jsonlib.dumps(found.to_json()) if json else str(found))
    if not found.same:
        raise typer.Exit(2)
