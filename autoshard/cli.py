"""The command line: ``autoshard explain``, ``verify``, ``show``, ``diff`` and ``probe``.

Exit codes: 0 done, 1 refused, below the gate or not exact, 2 wrong usage. torch is imported only once a
model must be read.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console, Group, RenderableType

from autoshard.diff import differences, render_differences
from autoshard.errors import AutoshardError, CoverageTooLow, MeshMismatch
from autoshard.layout import to_text
from autoshard.plans import Plan
from autoshard.proving.proof import Proof
from autoshard.report import render, render_passes
from autoshard.words import percent

_TRACEBACK = "autoshard.traceback"
_MIN_WIDTH, _MAX_WIDTH = 60, 120
_DTYPES = click.Choice(["float32", "bfloat16", "float16", "float64"])


class _Command(click.Command):
    """A command that prints a refusal as text and exits with 1, unless ``--traceback`` asks for more."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AutoshardError as error:
            if ctx.meta.get(_TRACEBACK):
                raise
            click.echo(f"error: {error}", err=True)
            ctx.exit(1)


def _remember_traceback(ctx: click.Context, _option: click.Parameter, value: bool) -> None:
    ctx.meta[_TRACEBACK] = value


_traceback = click.option(
    "--traceback",
    is_flag=True,
    expose_value=False,
    callback=_remember_traceback,
    help="Show where an error was raised.",
)


def _overrides(_ctx: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Read ``PATTERN=replicate`` options."""
    found: dict[str, str] = {}
    for value in values:
        pattern, equals, decision = value.rpartition("=")
        if not (equals and pattern and decision):
            raise click.BadParameter(f"{value!r} is not PATTERN=replicate")
        found[pattern] = decision
    return found


def _settings(_ctx: click.Context, _option: click.Parameter, value: str | None) -> tuple[str, list[Any]] | None:
    """Read a ``NAME=A,B,...`` option; values are numbers, but for names of devices."""
    if value is None:
        return None
    name, _, values = value.partition("=")
    try:
        return name.replace("-", "_"), [v if name == "device" else int(v) for v in values.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not NAME=A,B,... with numbers") from error


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="autoshard")
def main() -> None:
    """Infer, explain and prove how a PyTorch model is cut over a device mesh."""


_POSITIVE = click.IntRange(min=1)


@main.command(cls=_Command)
@click.argument("target")
@click.option("--world", type=_POSITIVE, required=True, help="Number of ranks.")
@click.option("--tp", type=_POSITIVE, help="Pin the tensor-parallel degree.")
@click.option("--dp-shard", type=_POSITIVE, help="Pin the FSDP degree.")
@click.option("--dp-replicate", type=_POSITIVE, help="Pin the number of FSDP replicas.")
@click.option("--batch", type=_POSITIVE, help="Sequences per data rank; 1 where left out.")
@click.option("--sequence", type=_POSITIVE, help="Tokens per sequence; 2048 where left out.")
@click.option("--dtype", type=_DTYPES, help="Dtype of activations; the parameters' own where left out.")
@click.option("--global-batch", type=_POSITIVE, help="Sequences of one step over all data ranks, not --batch.")
@click.option("--device", help="Such as H100-80, or a file of `autoshard probe`; H100-80 where left out.")
@click.option("--memory", type=click.FloatRange(min=0, min_open=True), help="GiB of one device.")
@click.option("--nodes", type=_POSITIVE, help="Number of nodes: says how many devices are in each.")
@click.option("--devices-per-node", type=_POSITIVE, help="Devices that share a fast link.")
@click.option("--interconnect", metavar="RATE", help="Between nodes, for each device: 400Gb, 50GB/s, 3.2Tb/node.")
@click.option("--optimizer", type=click.Choice(["adamw", "sgd", "sgd-momentum"]), help="adamw where left out.")
@click.option("--mixed-precision", type=click.Choice(["bfloat16"]), help="Compute in it.")
@click.option("--masters", type=click.Choice(["float32"]), help="Hold parameters in it for a narrower model.")
@click.option("--tp-reduce-dtype", type=_DTYPES, help="Sum over tp in it; the dtype of each value where left out.")
@click.option("--checkpointing", type=click.Choice(["none", "selective", "full"]), help="Chosen where left out.")
@click.option(
    "--sequence-parallel/--no-sequence-parallel",
    default=None,
    help="Cut the sequence over tp between regions, in training.",
)
@click.option("--logits", type=click.Choice(["whole", "sharded"]), help="What the model returns; whole where left out.")
@click.option(
    "--override", "overrides", multiple=True, callback=_overrides, metavar="PATTERN=replicate", help="Pin modules."
)
@click.option("--json", "as_json", is_flag=True, help="Write the plan as JSON and nothing else.")
@click.option("--passes", is_flag=True, help="Show each pass, its time and what it found.")
@click.option("--dump-dir", type=click.Path(file_okay=False), help="Write each stage as text in this folder.")
@click.option("--fail-under", type=click.FloatRange(0, 1), help="Exit with 1 if a smaller share is cut over tp.")
@click.option(
    "--what-if",
    "settings",
    callback=_settings,
    metavar="NAME=A,B,...",
    help="Show the best mesh for each value of world, batch, sequence, global_batch or device.",
)
@click.option("--formula", is_flag=True, help="Write out what a step costs, in batch, sequence and degrees.")
@_traceback
def explain(
    target: str,
    as_json: bool,
    passes: bool,
    fail_under: float | None,
    settings: tuple[str, list[Any]] | None,
    formula: bool,
    **options: Any,
) -> None:
    """Plan the model that TARGET names, and say why.

    TARGET is model.py (with one model in it), model.py:name, package.module:name, or a Hugging Face config.json.
    """
    if as_json and passes:
        raise click.UsageError("--json writes the plan and nothing else: leave out --passes")
    if settings is not None or formula:
        _explore(target, settings, formula, **options)
        return
    plan = _make_plan(target, **options)
    if as_json:
        click.echo(plan.to_json(), nl=False)
    else:
        _print(Group(render(plan), render_passes(plan)) if passes else render(plan))
    if fail_under is not None:
        _check_coverage(plan, fail_under)


@main.command(cls=_Command)
@click.argument("target")
@click.option("--tp", type=_POSITIVE, help="Plan for this tensor-parallel degree.")
@click.option("--plan", "path", type=click.Path(), help="Prove the plan in this file; its mesh may be of any size.")
@click.option("--processes", type=_POSITIVE, help="Prove TP and FSDP on this many local processes too.")
@click.option("--json", "as_json", is_flag=True, help="Write the proof as JSON and nothing else.")
@_traceback
def verify(target: str, tp: int | None, path: str | None, processes: int | None, as_json: bool) -> None:
    """Prove a plan for the model that TARGET names, and say what is wrong with it.

    Outputs and every gradient are held against the untouched model, all tensor-parallel ranks simulated in one process.
    Exits with 1 if they differ. TARGET is as for explain.
    """
    if tp is None and path is None:
        raise click.UsageError("give --tp N to prove a new plan, or --plan FILE to prove that one")
    plan = None if path is None else Plan.load(path)
    _check_degrees(plan, tp, processes)
    proof = _prove(target, tp, plan, processes)
    if as_json:
        click.echo(proof.to_json(), nl=False)
    else:
        from autoshard.report_proof import render as render_proof

        _print(render_proof(proof))
    if not proof.ok:
        sys.exit(1)


@main.command(cls=_Command)
@click.argument("path", type=click.Path())
@_traceback
def show(path: str) -> None:
    """Show a plan that `autoshard explain --json` wrote; needs no torch."""
    _print(render(Plan.load(path)))


@main.command(cls=_Command)
@click.argument("first", type=click.Path())
@click.argument("second", type=click.Path())
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the plans differ.")
@_traceback
def diff(first: str, second: str, exit_code: bool) -> None:
    """Show what differs between two plan files; needs no torch."""
    found = differences(Plan.load(first), Plan.load(second))
    _print(render_differences(found))
    if found and exit_code:
        sys.exit(1)


@main.command(cls=_Command)
@click.option("--processes", type=click.IntRange(min=2), default=2, show_default=True, help="Local ranks: its devices.")
@click.option("--out", type=click.Path(dir_okay=False), help="Write the file here, not to the standard output.")
@_traceback
def probe(processes: int, out: str | None) -> None:
    """Measure this machine's processors as a cluster of local processes, for plans that are made for it.

    Run it while nothing else runs. What it writes is a file that Cluster.load reads.
    """
    with _progress(f"measuring with {processes} processes"):
        from autoshard import probe as probing

        cluster = probing.probe(processes)
    if out is None:
        click.echo(cluster.to_toml(), nl=False)
    else:
        cluster.save(out)
        click.echo(f"{cluster.device.name}: written to {out}")


def _check_degrees(plan: Plan | None, tp: int | None, processes: int | None) -> None:
    """Refuse degrees that contradict each other before the model is read."""
    degree = tp or (plan.mesh.tp if plan is not None else 1)
    if plan is not None and plan.mesh.tp != degree:
        raise MeshMismatch(
            f"the plan is for {plan.mesh.tp} tensor-parallel ranks",
            got=f"--tp {tp}; allowed: {plan.mesh.tp}",
            help="leave out --tp, or --plan to prove a new plan",
        )
    if processes is not None and processes % degree:
        raise MeshMismatch(
            f"{processes} processes are no multiple of {degree} tensor-parallel ranks",
            got=f"--processes {processes}; allowed: {degree}, {2 * degree}, {3 * degree}, ...",
        )


def _prove(target: str, tp: int | None, plan: Plan | None, processes: int | None) -> Proof:
    """Prove a plan in one process; if that holds and it is asked for, on local processes too."""
    with _progress(f"reading {target}") as say:
        from autoshard.targets import load_model

        model = load_model(target)
        from autoshard import api
        from autoshard.proving import verification

        made: Plan = api.plan(model, world=tp, tp=tp, progress=say) if plan is None else plan
        proof: Proof = verification.verify(model, made, progress=say)
        if proof.ok and processes is not None:
            from autoshard.proving.processes import verify_in_processes

            return verify_in_processes(model, made, processes, target=target, progress=say)
        return proof


def _make_plan(target: str, **options: Any) -> Plan:
    """Read the model and plan it; a terminal shows which pass is at work."""
    with _progress(f"reading {target}") as say:
        from autoshard.targets import load_model

        model = load_model(target)
        from autoshard import api

        plan: Callable[..., Plan] = api.plan
        return plan(model, progress=say, **_machine(options))


def _explore(target: str, settings: tuple[str, list[Any]] | None, formula: bool, **options: Any) -> None:
    """Show other settings, or the cost written out, in place of the plan."""
    del options["dump_dir"]
    with _progress(f"reading {target}") as say:
        from autoshard.targets import load_model

        model = load_model(target)
        from autoshard import exploring, report_meshes

        options = _machine(options)
        parts: list[RenderableType] = []
        if settings is not None:
            name, values = settings
            rows = exploring.what_if(model, name, values, progress=say, **options)
            parts.append(report_meshes.what_if(name, rows))
        if formula:
            parts.append(report_meshes.written_out(exploring.formulas(model, progress=say, **options)))
    _print(Group(*parts))


def _machine(options: dict[str, Any]) -> dict[str, Any]:
    """Turn what the command line says of the machine into what ``plan`` takes."""
    nodes, world = options.pop("nodes"), options["world"]
    if nodes is not None:
        if options["devices_per_node"] is not None and nodes * options["devices_per_node"] != world:
            raise MeshMismatch(
                f"{nodes} nodes of {options['devices_per_node']} devices are not a world of {world}",
                help="leave out --nodes or --devices-per-node",
            )
        if world % nodes:
            raise MeshMismatch(f"a world of {world} does not divide over {nodes} nodes", got=f"--nodes {nodes}")
        options["devices_per_node"] = world // nodes
    device = options["device"]
    if device is not None and device.endswith(".toml"):
        from autoshard.cluster import Cluster

        options["device"] = Cluster.load(device)
    return options


@contextmanager
def _progress(first: str) -> Iterator[Callable[[str], None] | None]:
    """Show what is being done on stderr while the block runs; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with Console(stderr=True).status(first) as status:
        yield status.update


def _check_coverage(plan: Plan, wanted: float) -> None:
    coverage = plan.coverage
    if min(coverage.parameter_bytes, coverage.matmul_flops) < wanted:
        raise CoverageTooLow(
            f"less than {percent(wanted)} of the model is cut over tp",
            got=f"{percent(coverage.parameter_bytes)} of parameter bytes, {percent(coverage.matmul_flops)} of matmul "
            f"FLOPs, with {plan.mesh}",
            help="the plan says what was left whole and why; lower --fail-under to accept it",
        )


def _print(renderable: RenderableType) -> None:
    """Print in colour at a terminal's width, within limits; as plain text of 80 columns into a pipe or a file."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size((80, 24)).columns
        Console(width=min(max(width, _MIN_WIDTH), _MAX_WIDTH), highlight=False).print(renderable)
    else:
        click.echo(to_text(renderable, 80), nl=False)
