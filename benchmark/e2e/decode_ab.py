#!/usr/bin/env python3
"""A/B of decode speed on the real server: the engine alone against the plugin, with proof of what ran.

    python benchmark/e2e/decode_ab.py --model-path DIR                      # engine against plugin
    python benchmark/e2e/decode_ab.py --model-path DIR --arms engine plugin requant,expected_m

Every arm is a fresh ``python -m sglang.launch_server`` with the same flags; arms alternate (A B, B A, ...). Within one
start every concurrency is measured ``--rounds`` times after a warm-up. Differences are paired and carry a 95% interval over
the starts.

An arm is proved by the plugin's lines in the server's log and by kernel names in a profile that ends every start. Exit
status: 0 measured and proved; 1 a server failed; 2 wrong arguments; 3 the time ran out (run again to go on: finished
starts are kept in ``--work``, but for ``--mode resident``, which needs one call); 4 an arm was not what it says, and no figure
is written.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import client, evidence, paired, report
from harness.arms import ENGINE, PLUGIN, REFERENCE, Arm, parse_arm
from harness.cli import (
    FAILED,
    INCOMPLETE,
    NOT_PROVED,
    Clock,
    Journal,
    Model,
    NotProvedError,
    add_server_arguments,
    check_fits,
    conditions,
    file_name,
    fingerprint,
    launch_options,
    positive_int,
    wait_ready,
)
from harness.report import say
from harness.server import RIGHT_ROWS, LaunchOptions, Server, ServerError, install_cleanup, parse_command

DEEPSEEK_V3_MOE_LAYERS = 58
BENCH_SERVING = (sys.executable, "-m", "sglang.bench_serving")
# What a picture is of: cells that differ in the arm and in the number of requests alone.
SERIES = ("model", "engine", "layers", "experts", "tp", "ep", "dp", "routing", "baseline", "padded_rows")
SERIES += ("input_len", "output_len", "client")
KEY = (*SERIES, "concurrency", "arm")
INPUT_LEN, OUTPUT_LEN = 128, 256
# Streamed, speed is taken from the second chunk on, and over one more at least; the engine's tool leaves out the first token.
SHORTEST_OUTPUT = {"stream": 2 * client.STREAM_INTERVAL + 1, "bench_serving": 2}
# Every rank writes a trace, and traces grow with the layers.
_PROFILE_TIMEOUT_S = 120.0
# A file's name has at most 255 bytes, and an arm may be a list of patches.
_LONGEST_ARMS = 80


@dataclass(frozen=True)
class Plan:
    """How one start is measured."""

    concurrencies: tuple[int, ...]
    rounds: int
    input_len: int
    output_len: int
    profile_at: int
    profile_steps: int
    vocab_size: int
    dp: int = 1
    bench_serving: tuple[str, ...] = ()  # how to start the engine's tool; empty: our own streamed batch

    @property
    def client(self) -> str:
        """What measures, as the results name it."""
        return "bench_serving" if self.bench_serving else "stream"

    def prompts(self, concurrency: int, round_: int) -> list[list[int]]:
        """The same for every arm and block."""
        return client.random_prompts(concurrency, self.input_len, self.vocab_size, seed=1000 * concurrency + round_)


@dataclass
class Start:
    """What one start of one arm gave; kept as JSON between runs."""

    arm: str
    block: int
    samples: list[dict[str, Any]]
    live: list[str]
    problems: list[str]
    log: str
    ready_s: float
    kernels: dict[str, int]
    top_kernels: list[tuple[str, int, float]]
    per_layer_us: dict[str, float]
    backend: str = "cutlass"


async def _measure_once(
    http: Any, server: Server, plan: Plan, concurrency: int, block: int, round_: int
) -> dict[str, Any]:
    offset = server.log_size()
    if plan.bench_serving:
        rate = await client.bench_serving(
            plan.bench_serving,
            server.url,
            server.options.model_path,
            concurrency,
            plan.input_len,
            plan.output_len,
            seed=1000 * concurrency + round_,
        )
    else:
        prompts = plan.prompts(concurrency, round_)
        rate = client.decode_rate(await client.stream_batch(http, server.url, prompts, plan.output_len))
    # The scheduler logs per attention rank.
    own = evidence.engine_decode_rate(server.log_text(offset), concurrency // plan.dp)
    say(
        f"{server.arm.name}: block {block + 1}, round {round_ + 1}/{plan.rounds}, {concurrency} requests: "
        f"{rate.tokens_per_s:.0f} tokens/s, {rate.tpot_ms:.3f} ms"
    )
    return {
        "concurrency": concurrency,
        "round": round_,
        "tokens_per_s": rate.tokens_per_s,
        "tpot_ms": rate.tpot_ms,
        "window_s": rate.window_s,
        "engine_tokens_per_s": own * plan.dp if own is not None else None,
    }


async def warm_up(http: Any, server: Server, plan: Plan) -> None:
    """Every concurrency once, a few tokens: graphs are replayed and allocators filled before anything counts."""
    for concurrency in plan.concurrencies:
        await client.stream_batch(http, server.url, plan.prompts(concurrency, -1), 4 * client.STREAM_INTERVAL)


async def take_profile(http: Any, server: Server, plan: Plan, directory: Path) -> list[evidence.Profile]:
    """A profile of some decode steps, one of every rank, through the engine's own profiler endpoints.

    Raises:
        NotProvedError: not every rank's whole trace came.
    """
    directory.mkdir(parents=True, exist_ok=True)
    before = set(directory.glob("*.trace.json.gz"))
    started = asyncio.Event()
    # Long enough that decoding goes on while the profiler starts.
    prompts = plan.prompts(plan.profile_at, -2)
    load = asyncio.create_task(client.stream_batch(http, server.url, prompts, max(plan.output_len, 256), started))
    done, _ = await asyncio.wait(
        [load, waiter := asyncio.create_task(started.wait())], return_when=asyncio.FIRST_COMPLETED
    )
    waiter.cancel()
    if load in done:
        load.result()
        raise NotProvedError("profile: the batch ended before it could be profiled: ask for longer outputs")
    body = {
        "output_dir": str(directory),
        "num_steps": plan.profile_steps,
        "activities": ["CPU", "GPU"],
        "with_stack": False,
        "record_shapes": False,
    }
    await client.post(http, server.url, "/start_profile", body)
    await load
    deadline, last = time.monotonic() + _PROFILE_TIMEOUT_S, "no trace file"
    profiles: dict[Path, evidence.Profile] = {}
    while time.monotonic() < deadline:
        for path in sorted(set(directory.glob("*.trace.json.gz")) - before - profiles.keys()):
            try:
                profiles[path] = evidence.read_profile(path)
                last = "no further trace file"
            except ValueError as error:  # still being written
                last = str(error)
        if len(profiles) >= server.options.tp:
            return [profiles[path] for path in sorted(profiles)]
        server.check_alive()
        await asyncio.sleep(0.3)
    raise NotProvedError(f"profile: {last}; whole ones of {len(profiles)} ranks, must be of {server.options.tp}")


def prove(server: Server, profiles: Sequence[evidence.Profile]) -> tuple[list[str], str, list[str]]:
    """The live patches, what computed the experts, and what contradicts the arm, on any rank."""
    seen = evidence.read_log(server.log_text())
    problems = evidence.check_log(server.arm, seen, server.options.tp, report.version("sglang"))
    live = list(dict.fromkeys(name for names in seen.first_calls for name in names))
    backend = evidence.computed_by(server.arm, seen)
    for profile in profiles:
        problems += evidence.check_kernels(live, profile.counts, backend)
    return live, backend, list(dict.fromkeys(problems))


async def _start_of(server: Server, plan: Plan, block: int, ready_s: float, traces: Path) -> Start:
    async with client.session() as http:
        await warm_up(http, server, plan)
        samples = []
        for round_ in range(plan.rounds):
            for concurrency in plan.concurrencies:
                samples.append(await _measure_once(http, server, plan, concurrency, block, round_))
        profiles = await take_profile(http, server, plan, traces)
    return _finished(server, block, samples, ready_s, profiles)


def _finished(
    server: Server, block: int, samples: list[dict[str, Any]], ready_s: float, profiles: Sequence[evidence.Profile]
) -> Start:
    live, backend, problems = prove(server, profiles)
    profile = evidence.Profile.of_ranks(profiles)
    return Start(
        arm=server.arm.name,
        block=block,
        samples=samples,
        live=live,
        problems=problems,
        log=server.log_path.name,
        ready_s=ready_s,
        kernels=dict(profile.counts),
        top_kernels=profile.top(),
        per_layer_us=profile.per_layer_us(),
        backend=backend,
    )


def run_fresh(
    arms: Sequence[Arm], options: LaunchOptions, plan: Plan, blocks: int, journal: Journal, clock: Clock, ready_s: float
) -> list[Start] | None:
    """A server per arm and block, one after the other. None when the time ran out."""
    by_name = {arm.name: arm for arm in arms}
    starts: list[Start] = []
    for block in range(blocks):
        for name in paired.arm_order([arm.name for arm in arms], block):
            arm = by_name[name]
            kept = journal.load(_start_name(arm, block))
            if kept is not None:
                say(f"{name}: block {block + 1} is kept from the last run")
                starts.append(Start(**kept))
                continue
            if not clock.fits("start"):
                return None
            begin = time.monotonic()
            log = journal.directory / f"{_start_name(arm, block)}.log"
            say(f"{name}: block {block + 1}/{blocks}: starting, log {log}")
            with Server(arm, options, log).start() as server:
                took = wait_ready(server, ready_s, clock)
                if took is None:
                    return None
                start = asyncio.run(_start_of(server, plan, block, took, journal.directory / f"traces-{arm.slug}"))
            clock.spent("start", time.monotonic() - begin)
            _accept(arm, start, journal)
            starts.append(start)
    return starts


def _start_name(arm: Arm, block: int) -> str:
    return f"block{block}-{arm.slug}"


def _accept(arm: Arm, start: Start, journal: Journal) -> None:
    """Keep a start that proved its arm.

    Raises:
        NotProvedError: it did not; nothing of it is kept but the log.
    """
    if start.problems:
        raise NotProvedError(f"{arm.name} was not what it says ({start.log}): {'; '.join(start.problems)}")
    say(f"{arm.name}: proved: live patches {', '.join(start.live) or 'none'}")
    journal.save(_start_name(arm, start.block), asdict(start))


def run_resident(
    arms: Sequence[Arm], options: LaunchOptions, plan: Plan, blocks: int, journal: Journal, clock: Clock, ready_s: float
) -> list[Start] | None:
    """All arms' servers at once on the same GPUs, measured in turns while the others idle. None: the time ran out.

    One start per arm instead of one per arm and block: faster, but how starts of one arm differ stays hidden. Arms are proved
    at the end, and nothing is kept before that.
    """
    kept = [journal.load(_start_name(arm, block)) for block in range(blocks) for arm in arms]
    if all(start is not None for start in kept):
        return [Start(**start) for start in kept if start is not None]
    servers = {arm.name: Server(arm, options, journal.directory / f"resident-{arm.slug}.log") for arm in arms}
    took: dict[str, float] = {}
    try:
        for name, server in servers.items():  # one after the other: the first one fills the compiler caches
            say(f"{name}: starting, log {server.log_path}")
            ready = wait_ready(server.start(), ready_s, clock)
            if ready is None:
                return None
            took[name] = ready
        starts = asyncio.run(_resident_blocks(arms, servers, plan, blocks, took, journal, clock))
    finally:
        for server in servers.values():
            server.stop()
    if starts is None:
        return None
    by_name = {arm.name: arm for arm in arms}
    for start in starts:
        _accept(by_name[start.arm], start, journal)
    return starts


async def _resident_blocks(
    arms: Sequence[Arm],
    servers: dict[str, Server],
    plan: Plan,
    blocks: int,
    took: dict[str, float],
    journal: Journal,
    clock: Clock,
) -> list[Start] | None:
    samples: dict[tuple[str, int], list[dict[str, Any]]] = {(arm.name, b): [] for arm in arms for b in range(blocks)}
    names = [arm.name for arm in arms]
    async with client.session() as http:
        for server in servers.values():
            await warm_up(http, server, plan)
        for block in range(blocks):
            begin = time.monotonic()
            if not clock.fits("block"):
                return None
            for round_ in range(plan.rounds):
                for concurrency in plan.concurrencies:
                    for name in paired.arm_order(names, block + round_):
                        sample = await _measure_once(http, servers[name], plan, concurrency, block, round_)
                        samples[name, block].append(sample)
            clock.spent("block", time.monotonic() - begin)
        profiles = {
            arm.name: await take_profile(http, servers[arm.name], plan, journal.directory / f"traces-{arm.slug}")
            for arm in arms
        }
    return [
        _finished(servers[name], block, taken, took[name], profiles[name]) for (name, block), taken in samples.items()
    ]


def cells_of(
    starts: Sequence[Start],
    arms: Sequence[Arm],
    model: Model,
    options: LaunchOptions,
    plan: Plan,
    engine: str,
    one_start: bool = False,
) -> list[dict[str, Any]]:
    """One cell per arm and concurrency; the first arm is the baseline. ``one_start``: of each arm, whatever the blocks."""
    cells = []
    for concurrency in plan.concurrencies:
        samples = [
            paired.Sample(start.arm, start.block, taken["round"], taken["tokens_per_s"], taken["tpot_ms"])
            for start in starts
            for taken in start.samples
            if taken["concurrency"] == concurrency
        ]
        for arm in arms:
            mine = [sample for sample in samples if sample.arm == arm.name]
            own = [
                taken["engine_tokens_per_s"]
                for start in starts
                for taken in start.samples
                if start.arm == arm.name
                and taken["concurrency"] == concurrency
                and taken["engine_tokens_per_s"] is not None
            ]
            versus = paired.compare(samples, arms[0].name, arm.name, one_start) if arm is not arms[0] else None
            cell = _cell(arm, mine, own, versus, model, options, concurrency, engine, starts)
            cell["baseline"] = arms[0].name
            cell["baseline_tokens_per_s"] = cells[-arms.index(arm)]["tokens_per_s"] if versus else None
            cells.append({**cell, "input_len": plan.input_len, "output_len": plan.output_len, "client": plan.client})
    return cells


def _cell(
    arm: Arm,
    samples: Sequence[paired.Sample],
    own: Sequence[float],
    versus: paired.Comparison | None,
    model: Model,
    options: LaunchOptions,
    concurrency: int,
    engine: str,
    starts: Sequence[Start],
) -> dict[str, Any]:
    saved_us = versus.saved_ms * 1e3 / model.moe_layers if versus and model.moe_layers else None
    return {
        "model": model.name,
        "engine": engine,
        "layers": model.layers,
        "moe_layers": model.moe_layers,
        "experts": model.experts,
        "tp": options.tp,
        "ep": options.ep,
        "dp": options.dp,
        "routing": options.routing,
        "padded_rows": options.padded_rows,
        "concurrency": concurrency,
        "arm": arm.name,
        "patches": next(",".join(start.live) for start in starts if start.arm == arm.name),
        "backend": next(start.backend for start in starts if start.arm == arm.name),
        "tokens_per_s": round(statistics.median([s.tokens_per_s for s in samples]), 1),
        "tpot_ms": round(statistics.median([s.tpot_ms for s in samples]), 4),
        "engine_log_tokens_per_s": round(statistics.median(own), 1) if own else None,
        "repeats": len(samples),
        "blocks": len({s.block for s in samples}),
        "gain_pct": round(versus.gain_pct, 3) if versus else None,
        "gain_low_pct": round(versus.low_pct, 3) if versus else None,
        "gain_high_pct": round(versus.high_pct, 3) if versus else None,
        "interval": [round(versus.low_pct, 3), round(versus.high_pct, 3)] if versus else None,
        "interval_method": versus.interval_method if versus else None,
        "noise_pct": round(versus.noise_pct, 3) if versus else None,
        "verdict": versus.verdict if versus else "baseline",
        "saved_us_per_moe_layer": round(saved_us, 3) if saved_us is not None else None,
        "saved_ms_58_layers": round(saved_us * DEEPSEEK_V3_MOE_LAYERS / 1e3, 3) if saved_us is not None else None,
    }


def series_name(cell: Mapping[str, Any]) -> str:
    """What tells pictures apart in their files' names: model, engine and routing, and what is not as by default on one GPU."""
    parts = [cell["model"], cell["engine"], cell["routing"]]
    if cell["tp"] > 1:
        parts.append(f"tp{cell['tp']}-ep{cell['ep']}-dp{cell['dp']}")
    if cell["baseline"] != ENGINE:
        parts.append(f"over-{cell['baseline']}")
    if cell["padded_rows"] != RIGHT_ROWS:
        parts.append(f"{cell['padded_rows']}rows")
    if (cell["input_len"], cell["output_len"]) != (INPUT_LEN, OUTPUT_LEN):
        parts.append(f"{cell['input_len']}-to-{cell['output_len']}")
    if cell["client"] != "stream":
        parts.append(cell["client"])
    return file_name("_".join(parts))


def samples_name(cell: Mapping[str, Any], arms: Sequence[Arm], concurrencies: Sequence[int]) -> str:
    """The same of a run's samples, which are of its own arms and numbers of requests."""
    names = "-".join(arm.name for arm in arms)
    if len(names) > _LONGEST_ARMS:
        names = f"{len(arms)}arms-{hashlib.sha256(names.encode()).hexdigest()[:8]}"
    return file_name(f"samples-{series_name(cell)}-{'-'.join(map(str, concurrencies))}-{names}")


def _outputs(
    cells: list[dict[str, Any]],
    starts: Sequence[Start],
    arms: Sequence[Arm],
    options: LaunchOptions,
    args: argparse.Namespace,
) -> None:
    serving = f"sglang {cells[0]['engine']}, {cells[0]['routing']} routing"
    requests = f"{', '.join(map(str, options.concurrencies))} requests"
    meta = report.run_meta(
        servers={f"{cells[0]['model']}, {arm.name}, {serving}, {requests}": options.shown(arm) for arm in arms},
        mode=args.mode,
        client=args.client,
        input_len=args.input_len,
        output_len=args.output_len,
    )
    for cell in cells:
        cell.update(_parts(cell, starts, args.profile_at))
    report.merge_results(args.out, meta, cells, KEY)
    merged = json.loads(args.out.read_text())
    report.write_csv(args.out.with_suffix(".csv"), merged["meta"], merged["cells"])
    name = series_name(cells[0])
    title = f"{cells[0]['model']}, {serving}, {meta['gpu']}"
    # Cells of an earlier run with other numbers of requests belong into the same picture.
    drawn = [cell for cell in merged["cells"] if all(cell[field] == cells[0][field] for field in SERIES)]
    report.draw_gains(args.out.with_name(f"{args.out.stem}_{name}.png"), title, arms[0].name, drawn)
    report.write_json(
        args.work / f"{samples_name(cells[0], arms, options.concurrencies)}.json",
        {"meta": meta, "starts": [asdict(start) for start in starts]},
    )
    columns = ["requests", "arm", "tokens/s", "TPOT ms", "gain %", "interval %", "interval", "noise %", "us/MoE layer"]
    columns += ["verdict"]
    report.print_table(
        title,
        columns,
        [
            [
                cell["concurrency"],
                cell["arm"],
                cell["tokens_per_s"],
                f"{cell['tpot_ms']:.3f}",
                "" if cell["gain_pct"] is None else cell["gain_pct"],
                "" if cell["interval"] is None else f"{cell['gain_low_pct']:.2f} .. {cell['gain_high_pct']:.2f}",
                cell["interval_method"] or "",
                "" if cell["noise_pct"] is None else cell["noise_pct"],
                "" if cell["saved_us_per_moe_layer"] is None else cell["saved_us_per_moe_layer"],
                cell["verdict"],
            ]
            for cell in cells
        ],
    )
    for cell in cells:
        if cell["share_of_step"]:
            parts = ", ".join(f"{name} {part:.1%}" for name, part in cell["share_of_step"].items())
            say(f"{cell['arm']}: share of a step at {cell['concurrency']} requests: {parts}")


def _parts(cell: Mapping[str, Any], starts: Sequence[Start], profiled_at: int) -> dict[str, Any]:
    """What a step is made of, for the profiled concurrency: kernel time against the step without a profiler."""
    profiles = [start.per_layer_us for start in starts if start.arm == cell["arm"]]
    if cell["concurrency"] != profiled_at or not cell["moe_layers"]:
        return {"us_per_moe_layer": None, "share_of_step": None}
    spent = {name: statistics.median(profile[name] for profile in profiles) for name in profiles[0]}
    step_us = cell["tpot_ms"] * 1e3
    share = {name: round(value * cell["moe_layers"] / step_us, 4) for name, value in spent.items()}
    return {"us_per_moe_layer": {name: round(value, 2) for name, value in spent.items()}, "share_of_step": share}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A/B of decode speed on the real server.")
    parser.add_argument("--arms", nargs="+", default=[ENGINE, PLUGIN], help="first is the baseline; see the README")
    parser.add_argument("--concurrency", type=positive_int, nargs="+", default=[8, 32, 128, 256])
    parser.add_argument("--blocks", type=positive_int, default=2, help="starts of every arm (A B, B A, ...)")
    parser.add_argument("--rounds", type=positive_int, default=3, help="measurements of every concurrency in a start")
    parser.add_argument(
        "--client", choices=("stream", "bench_serving"), default="stream", help="bench_serving: the engine's own tool"
    )
    parser.add_argument("--bench-serving-command", type=parse_command, default=BENCH_SERVING, help=argparse.SUPPRESS)
    parser.add_argument("--input-len", type=positive_int, default=INPUT_LEN)
    parser.add_argument("--output-len", type=positive_int, default=OUTPUT_LEN)
    parser.add_argument(
        "--mode", choices=("fresh", "resident"), default="fresh", help="resident: all arms' servers at once"
    )
    parser.add_argument(
        "--profile-at", type=positive_int, help="concurrency of the profile; default: 32, or the first above"
    )
    parser.add_argument("--profile-steps", type=positive_int, default=8)
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start nothing that would not end in time")
    parser.add_argument(
        "--out", type=Path, default=Path("e2e_decode.json"), help="results; merged into an existing file"
    )
    parser.add_argument("--work", type=Path, default=Path("e2e_work"), help="logs, traces and finished starts")
    add_server_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = _parser()
    args = parser.parse_args(argv)
    install_cleanup()
    try:
        arms = [parse_arm(text) for text in args.arms]
        if len({arm.name for arm in arms}) != len(arms) or len(arms) < 2:
            raise ValueError(f"arms: are {args.arms}, must be two or more different ones")
        if REFERENCE in args.arms:
            raise ValueError(f"arms: {REFERENCE!r} is no arm of a speed comparison; equality.py compares with it")
        model = Model.read(args.model_path, args.model_name)
        if args.out.suffix in (".csv", ".png"):
            raise ValueError(
                f"out: is {args.out}, must be the JSON's path; the table and the pictures are named after it"
            )
        report.check_mergeable(args.out, report.run_meta(), KEY)
        concurrencies = sorted(set(args.concurrency))
        if args.profile_at is None:
            args.profile_at = next((c for c in concurrencies if c >= 32), concurrencies[-1])
        if args.profile_at not in concurrencies:
            numbers = ", ".join(map(str, concurrencies))
            raise ValueError(f"profile-at: is {args.profile_at}, must be one that --concurrency has: {numbers}")
        if args.output_len < (least := SHORTEST_OUTPUT[args.client]):
            raise ValueError(f"output-len: is {args.output_len}, must be at least {least} to be measured")
        options = launch_options(args, concurrencies)
        check_fits(options, model)
        if args.blocks > 1:
            paired.t_quantile(args.blocks)  # whether the interval can be computed, before a server starts
        if args.client == "bench_serving" and options.skip_tokenizer:
            raise ValueError("client: is 'bench_serving', must be 'stream' without --with-tokenizer: it counts text")
        if args.mode == "resident":
            # What a server's share of the memory is, it computes from what it finds free.
            need = max(concurrencies) * (args.input_len + args.output_len + 256)
            total = options.max_total_tokens or need
            options = dataclasses.replace(options, max_total_tokens=total, mem_fraction=args.mem_fraction / len(arms))
    except ValueError as error:
        parser.error(str(error))
    plan = Plan(
        tuple(concurrencies),
        args.rounds,
        args.input_len,
        args.output_len,
        args.profile_at,
        args.profile_steps,
        model.vocab_size,
        args.dp,
        args.bench_serving_command if args.client == "bench_serving" else (),
    )
    engine = report.version("sglang")
    run_of = {
        "model": fingerprint(model, args.model_path),
        "options": asdict(options),
        "plan": asdict(plan),
        "mode": args.mode,
        "arms": [asdict(arm) for arm in arms],  # interleaved: another arm's starts are of another time
        **conditions(options.environ(parse_arm(ENGINE))),
    }
    journal, clock = Journal(args.work, "decode", run_of), Clock(args.time_limit)
    run = run_fresh if args.mode == "fresh" else run_resident
    try:
        starts = run(arms, options, plan, args.blocks, journal, clock, args.ready_timeout)
    except NotProvedError as error:
        say(f"NOT PROVED: {error}")
        return NOT_PROVED
    except (ServerError, *client.FAILURES) as error:
        say(f"FAILED: {error!r}" if not str(error) else f"FAILED: {error}")
        return FAILED
    if starts is None:
        if args.mode == "resident":
            say("the time is used up, and --mode resident keeps nothing before its end: it needs a longer --time-limit")
        else:
            say("the time is used up; run the same command again to go on")
        return INCOMPLETE
    cells = cells_of(starts, arms, model, options, plan, engine, one_start=args.mode == "resident")
    _outputs(cells, starts, arms, options, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
