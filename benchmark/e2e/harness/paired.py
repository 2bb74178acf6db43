"""Paired comparison of two arms with an interval; noise is never called a win.

A *block* is one start of every arm; a *round* one measurement within it. Round r of block b of one arm is paired with
round r of block b of the other: what drifts during a session drifts for both.

Starts may differ by more than rounds of one start do, and there are few of them. A bootstrap that draws two blocks again spans
little more than the two, and both are on the same side of the truth half of the time. So the interval is Student's t over the
blocks' medians: with two blocks 12.7 standard errors wide on either side, with three 4.3. The rounds of a single block say
nothing of starts, and there is never a verdict on them.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One measurement of one arm."""

    arm: str
    block: int
    round: int
    tokens_per_s: float
    tpot_ms: float


@dataclass(frozen=True)
class Comparison:
    """An arm against the baseline.

    Attributes:
        gain_pct: more tokens per second, in percent: mean over blocks of the median paired ratio.
        low_pct, high_pct: 95% interval of it.
        interval_method: what the interval is of: `OVER_STARTS`, `OVER_BLOCKS` or `OVER_ROUNDS`.
        noise_pct: largest difference between two blocks of the same arm.
        saved_ms, saved_low_ms, saved_high_ms: time saved per output token, likewise.
        verdict: ``faster`` or ``slower`` when the interval excludes zero and the gain exceeds the noise, else
            ``no difference shown``; ``one block: no verdict`` or ``one start: no verdict`` where each arm was started once.
        pairs, blocks: how many there are.
    """

    gain_pct: float
    low_pct: float
    high_pct: float
    interval_method: str
    noise_pct: float
    saved_ms: float
    saved_low_ms: float
    saved_high_ms: float
    verdict: str
    pairs: int
    blocks: int


FASTER, SLOWER, UNDECIDED = "faster", "slower", "no difference shown"
ONE_BLOCK, ONE_START = "one block: no verdict", "one start: no verdict"
# Student's t over the medians of blocks that are starts, or that one start of each arm was measured in; resampled rounds.
OVER_STARTS, OVER_BLOCKS, OVER_ROUNDS = "t over starts", "t over blocks of one start", "rounds of one start"
CONFIDENCE = 0.95


def _groups(samples: Sequence[Sample], arm: str) -> dict[int, dict[int, Sample]]:
    blocks: dict[int, dict[int, Sample]] = defaultdict(dict)
    for sample in samples:
        if sample.arm == arm:
            blocks[sample.block][sample.round] = sample
    return blocks


def _estimate(blocks: Sequence[Sequence[float]]) -> float:
    return statistics.fmean(statistics.median(block) for block in blocks)


def bootstrap_interval(
    rounds: Sequence[float], confidence: float = CONFIDENCE, resamples: int = 4000, seed: int = 0
) -> tuple[float, float]:
    """Interval of the median of one block's rounds, which are drawn with replacement."""
    rng = random.Random(seed)
    estimates = sorted(statistics.median(rng.choices(rounds, k=len(rounds))) for _ in range(resamples))
    cut = (1.0 - confidence) / 2.0
    return estimates[math.floor(cut * (resamples - 1))], estimates[math.ceil((1.0 - cut) * (resamples - 1))]


def t_quantile(blocks: int, confidence: float = CONFIDENCE) -> float:
    """Standard errors on either side of the mean of so many blocks.

    Raises:
        ValueError: scipy, which sglang installs, is missing.
    """
    try:
        from scipy import stats
    except ModuleNotFoundError as error:
        raise ValueError(
            f"blocks: is {blocks}, must be 1 without scipy: the interval over several starts is Student's t; install scipy"
        ) from error
    return float(stats.t.ppf((1.0 + confidence) / 2.0, blocks - 1))


def t_interval(blocks: Sequence[Sequence[float]], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Student's interval of the mean of two or more blocks' medians.

    Raises:
        ValueError: see `t_quantile`.
    """
    medians = [statistics.median(block) for block in blocks]
    half = t_quantile(len(medians), confidence) * statistics.stdev(medians) / math.sqrt(len(medians))
    return statistics.fmean(medians) - half, statistics.fmean(medians) + half


def _interval(blocks: Sequence[Sequence[float]]) -> tuple[float, float]:
    return t_interval(blocks) if len(blocks) > 1 else bootstrap_interval(blocks[0])


def _block_noise(blocks: Mapping[int, Mapping[int, Sample]]) -> float:
    medians = [statistics.median(math.log(s.tokens_per_s) for s in rounds.values()) for rounds in blocks.values()]
    return max(medians) - min(medians)


def _pct(log_ratio: float) -> float:
    return math.expm1(log_ratio) * 100.0


def compare(samples: Sequence[Sample], baseline: str, arm: str, one_start: bool = False) -> Comparison:
    """Compare an arm with the baseline over all pairs that both have.

    Args:
        samples: of these arms, and of others.
        baseline, arm: their names.
        one_start: whether all blocks are of one start of each arm, instead of a start each.

    Raises:
        ValueError: they have no pair, or scipy is missing.
    """
    base, other = _groups(samples, baseline), _groups(samples, arm)
    ratios, savings = [], []
    for block in sorted(base.keys() & other.keys()):
        rounds = sorted(base[block].keys() & other[block].keys())
        if rounds:
            pairs = [(base[block][r], other[block][r]) for r in rounds]
            ratios.append([math.log(b.tokens_per_s / a.tokens_per_s) for a, b in pairs])
            savings.append([a.tpot_ms - b.tpot_ms for a, b in pairs])
    if not ratios:
        raise ValueError(f"arm: {arm!r} and {baseline!r} share no block and round")
    gain = _estimate(ratios)
    low, high = _interval(ratios)
    noise = max(_block_noise(base), _block_noise(other))
    decided = abs(gain) > noise and (low > 0.0 or high < 0.0)
    verdict = UNDECIDED if not decided else FASTER if gain > 0 else SLOWER
    method = OVER_BLOCKS if one_start else OVER_STARTS
    # One start of each arm says nothing about how starts differ.
    if len(ratios) == 1:
        verdict, method = ONE_BLOCK, OVER_ROUNDS
    elif one_start:
        verdict = ONE_START
    saved_low, saved_high = _interval(savings)
    return Comparison(
        gain_pct=_pct(gain),
        low_pct=_pct(low),
        high_pct=_pct(high),
        interval_method=method,
        noise_pct=_pct(noise),
        saved_ms=_estimate(savings),
        saved_low_ms=saved_low,
        saved_high_ms=saved_high,
        verdict=verdict,
        pairs=sum(map(len, ratios)),
        blocks=len(ratios),
    )


def arm_order(arms: Sequence[str], block: int) -> list[str]:
    """Order of the arms in a block: forth in even ones, back in odd ones (A B, B A, A B, ...)."""
    return list(arms) if block % 2 == 0 else list(reversed(arms))
