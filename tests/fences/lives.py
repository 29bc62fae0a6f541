"""What happens to a replica: each event at each time, and lives at random."""

import random
from collections.abc import Callable
from functools import partial

from tests.fences.stage import the_stage
from tests.fences.world import CHUNKS_MAX, Engine, Knobs

STEPS_MAX = 2_000
COPY_S = 0.03
"""Of a slow copy. A replica that waits for nothing else looks at each of them."""
REGISTER_S = 0.5
Life = Callable[[Engine], None]


def settle(engine: Engine) -> None:
    for number in range(STEPS_MAX):
        if not engine.busy():
            return
        if number > 20:  # some schedules let nobody else go on as long as one can
            the_stage().wait("step", lambda: False, COPY_S * 2 / 3 if number < 50 else 0.1)
        engine.step()
    raise AssertionError(f"requests that never go on: {engine.requests}")


def _stored(engine: Engine) -> None:
    stage = the_stage()
    stage.calm = True
    request = engine.arrive(2)
    engine.step()
    engine.end(request.name)
    settle(engine)
    assert engine.sides[-1].saver.drain(60.0)
    stage.calm = False


def _to_the_end(engine: Engine) -> None:
    settle(engine)
    for name in engine.running():
        engine.end(name)
    settle(engine)
    engine.step()  # what the last request had changes hands


def _go_on(engine: Engine) -> None:
    for _ in range(3):
        engine.arrive(2, stored=0)
        engine.step()
    _to_the_end(engine)


def _saving(engine: Engine) -> str:
    name = engine.arrive(2).name
    engine.step()
    return name


def _loading(engine: Engine, *, sync: bool) -> str:
    _stored(engine)
    return engine.arrive(3, sync=sync).name


def then(begin: Callable[[Engine], str], event: str, steps: int) -> Life:

    def life(engine: Engine) -> None:
        name = begin(engine)
        for _ in range(steps):
            engine.step()
        the_stage().give_way()
        _happen(engine, event, name)
        if event != "shutdown":
            _go_on(engine)

    return life


ENDED_FROM = {"abort": ("loading", "running"), "finish": ("running",)}
EVENTS = ("preempt", "abort", "finish", "sleep", "update", "lost", "shutdown")


def _happen(engine: Engine, event: str, name: str) -> None:
    request = engine.requests.get(name)
    match event:
        case "preempt":
            if request is not None and request.state == "running":
                engine.preempt(name)
        case "abort" | "finish":
            if request is not None and request.state in ENDED_FROM[event]:
                engine.end(name)
        case "sleep":
            engine.sleep()
            engine.wake()
        case "lost":
            engine.lose_connection()
        case "update":
            engine.update_weights()


def situations() -> dict[str, Life]:
    found: dict[str, Life] = {}
    for event in EVENTS:
        for steps in (0, 1):
            found[f"save {event} {steps}"] = then(_saving, event, steps)
        for sync in (False, True):
            for steps in (1, 2):
                kind, begin = "layerwise" if sync else "async", partial(_loading, sync=sync)
                found[f"load {kind} {event} {steps}"] = then(begin, event, steps)
    return found


def knobs_of(seed: int) -> Knobs:
    dice = random.Random(seed)
    return Knobs(
        late=dice.random() < 0.75,
        copy_s=dice.choice((0.0, 0.0, 0.0, COPY_S)),
        writes_early=dice.random() < 0.25,
        load_threads=dice.choice((1, 2)),
        arena_pages=dice.choice((0, 2, 4, 5)),
        keeps=dice.random() < 0.3,
        frames=dice.choice(("in place", "registering", "refused")),
        register_s=dice.choice((0.0, REGISTER_S)),
        drain_ms=dice.choice((0, 0, 30, 5_000)),
        save_ms=dice.choice((1, 60_000, 60_000, 60_000)),
        codec=dice.choice(("none", "none", "lz4")),
        spans=dice.choice((1, 2)),
        faults_of_100=dice.choice((0, 10, 30)),
    )


def at_random(seed: int) -> Life:
    dice = random.Random(seed)

    def life(engine: Engine) -> None:
        for _ in range(dice.randrange(4, 16)):
            while len(engine.free) >= 2 * CHUNKS_MAX * 2 and dice.random() < 0.5:
                stored = dice.choice((0, CHUNKS_MAX, CHUNKS_MAX))
                engine.arrive(dice.randint(1, CHUNKS_MAX), sync=dice.random() < 0.4, stored=stored)
            engine.step()
            _surprise(engine, dice)
        if dice.random() < 0.5:
            _to_the_end(engine)

    return life


def _surprise(engine: Engine, dice: random.Random) -> None:
    luck = dice.random()
    names = list(engine.requests)
    running = engine.running()
    if luck < 0.15 and running and len(engine.free) >= 2 * CHUNKS_MAX:
        engine.preempt(dice.choice(running))
    elif luck < 0.5 and names:
        engine.end(dice.choice(names))
    elif luck < 0.56:
        engine.sleep()
        engine.wake()
    elif luck < 0.62:
        engine.update_weights()
    elif luck < 0.68:
        engine.lose_connection()
