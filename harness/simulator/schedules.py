"""Random simulations, each from one seed."""

from __future__ import annotations

import dataclasses
import itertools
import random

from disagg.protocol.types import Limits, PeerRank
from harness.simulator.faults import RandomFaults
from harness.simulator.model import NUM_LAYERS
from harness.simulator.scenario import DECODE, INTRUDER, PREFILL, Loss, Piece, Scenario, Script, Stop
from harness.simulator.simulation import Simulation


def random_pieces(rng: random.Random, prompt: int, span_s: float) -> tuple[Piece, ...]:
    """Pieces by tokens, or by tokens and layers, in any order; sometimes one is missing or sent twice."""
    cuts = [0, *sorted(rng.sample(range(1, prompt), min(prompt - 1, rng.randrange(4)))), prompt]
    pieces = [Piece(rng.random() * span_s, tokens) for tokens in itertools.pairwise(cuts)]
    if rng.random() < 0.3:
        pieces = [Piece(p.after_s, p.tokens, (layer,)) for p in pieces for layer in range(NUM_LAYERS)]
    pieces.append(Piece(rng.random() * span_s, state=True))
    if rng.random() < 0.15:
        pieces[rng.randrange(len(pieces))] = rng.choice(pieces)
    elif rng.random() < 0.1:
        del pieces[rng.randrange(len(pieces))]
    return tuple(pieces)


def random_script(rng: random.Random, scenario_size: tuple[int, int], num_groups: int) -> Script:
    """A script for one request."""

    def times(num_ranks: int) -> dict[int, float]:
        probability = rng.choice((0.0, 0.0, 0.0, 0.3, 0.8))
        return {rank: rng.random() * rng.choice((1.0, 4.0, 12.0)) for rank in range(num_ranks) if rng.random() < probability}

    prompt, span = rng.randrange(1, 9), rng.choice((0.0, 1.0, 3.0))
    reverse = num_groups == 1 and rng.random() < 0.15
    num_senders, num_receivers = reversed(scenario_size) if reverse else scenario_size
    return Script(
        prompt=prompt,
        hit=rng.choice((0, 0, prompt, rng.randrange(prompt))),
        reserve_at=rng.random() * rng.choice((0.1, 3.0)),
        ready_after_s=rng.choice((0.0, 0.0, rng.random())),
        send_at=None if rng.random() < 0.04 else rng.random() * rng.choice((0.1, 3.0)),
        pieces=random_pieces(rng, prompt, span),
        finish_after_s=None if rng.random() < 0.04 else span,
        deadline_s=rng.choice((2.0, 10.0, 10.0)),
        send_deadline_s=rng.choice((2.0, 10.0, 10.0)),
        receive_aborts=times(num_receivers),
        send_aborts=times(num_senders),
        reverse=reverse,
        replicated=rng.random() < 0.3,
        source_group=rng.randrange(num_groups),
        destination_group=rng.randrange(num_groups),
        impostor_at=rng.random() * 3.0 if rng.random() < 0.1 else None,
        stray_at=rng.random() * 3.0 if num_groups > 1 and rng.random() < 0.5 else None,
        repeat=rng.random() < 0.1,
        skew_s=rng.choice((0.0, 0.2)),
    )


def random_keeping(rng: random.Random, scenario: Scenario) -> Scenario:
    """The same, but with requests that are kept for whoever takes them, often with two takers, and also the other one dies."""

    def keep(script: Script) -> Script:
        close = max(0.0, script.reserve_at + rng.uniform(-0.1, 0.1))
        return dataclasses.replace(
            script,
            kept=True,
            any_attempt=rng.random() < 0.3,
            replicated=scenario.scripts[0].replicated,  # a rank writes to the same ranks of an instance for all requests
            impostor_at=rng.choice((None, close, close, rng.random() * 3.0)),
        )

    intruder, moves = PeerRank(INTRUDER, 0), rng.random() < 0.4

    def moved(rank: PeerRank) -> PeerRank:
        return intruder if moves and rank.instance == DECODE else rank

    return dataclasses.replace(
        scenario,
        scripts=tuple(map(keep, scenario.scripts)),
        losses=tuple(
            dataclasses.replace(loss, rank=moved(loss.rank), other=loss.other and moved(loss.other)) for loss in scenario.losses
        ),
        stops=tuple(dataclasses.replace(stop, rank=moved(stop.rank)) for stop in scenario.stops),
    )


def random_loss(rng: random.Random, ranks: tuple[int, int]) -> Loss:
    """A restarted rank, or a connection that ends."""
    prefill, decode = PeerRank(PREFILL, rng.randrange(ranks[0])), PeerRank(DECODE, rng.randrange(ranks[1]))
    rank, other = (prefill, decode) if rng.random() < 0.5 else (decode, prefill)
    return Loss(
        at=rng.random() * 4.0,
        rank=rank,
        other=other if rng.random() < 0.4 else None,
        proved=rng.random() < 0.8,
        reopen=rng.random() < 0.3,
        notice_s=(rng.random(), rng.random()),
    )


def random_stops(rng: random.Random, ranks: tuple[int, int]) -> tuple[tuple[Stop, ...], tuple[Loss, ...]]:
    """Ranks that are stopped, and the connections that their peers give up meanwhile."""
    stops: list[Stop] = []
    losses: list[Loss] = []
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        loss = random_loss(rng, ranks)
        stop = Stop(loss.at, loss.rank, rng.choice((0.5, 3.0, 9.0)) * rng.random())
        stops.append(stop)
        if loss.other is not None:
            losses.append(dataclasses.replace(loss, at=stop.at + rng.random() * stop.seconds))
    return tuple(stops), tuple(losses)


def random_simulation(seed: int, *, pair: bool = False, kept: bool = False) -> Simulation:
    """A simulation of random size, with faults of random severity.

    `pair`: one sender, one receiver and one request. `kept`: all requests are kept for whoever takes them; otherwise so are
    those of one schedule in five.
    """
    rng = random.Random(seed)
    sizes = (1, 1) if pair else rng.choice(((1, 1), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (2, 3)))
    num_groups = 2 if not pair and rng.random() < 0.1 else 1
    severity = rng.choice((0.0, 0.05, 0.3))
    heal_at = rng.choice((0.0, 3.0, 15.0)) if severity else 0.0
    others = random.Random(f"{seed}:stops")  # so that the rest of a schedule is as it was without them
    stops, given_up = random_stops(others, sizes)
    scenario = Scenario(
        scripts=tuple(random_script(rng, sizes, num_groups) for _ in range(1 if pair else rng.choice((1, 1, 2, 3)))),
        num_senders=sizes[0],
        num_receivers=sizes[1],
        num_groups=num_groups,
        tp=rng.choice((1, 2)),
        losses=(
            *(
                dataclasses.replace(random_loss(rng, sizes), late_s=others.choice((0.0, 2.0)))
                for _ in range(rng.choice((0, 0, 0, 0, 1, 2)))
            ),
            *given_up,
        ),
        stops=stops,
        slots_only=others.random() < 0.3,
        heal_at=heal_at,
        limits=Limits(
            max_parked_reserves=rng.choice((1, 2, 64)), parked_reserve_s=15.0, drain_timeout_s=rng.choice((1.0, 10.0))
        ),
    )
    keeping = random.Random(f"{seed}:kept")
    if keeping.random() < 0.2 or kept:
        scenario = random_keeping(keeping, scenario)
    faults = RandomFaults(
        rng=rng,
        loss=severity,
        double=severity,
        slow=severity,
        trouble=rng.choice((0.0, 0.0, 0.1, 0.3)),
        stuck=rng.choice((0.0, 0.0, 0.0, 0.05)),
        heal_at=heal_at,
    )
    return Simulation(scenario, faults)
