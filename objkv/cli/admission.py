"""``objkv admission``: an operator's switch for loads, for a whole fleet or one namespace."""

import time
from typing import Annotated, cast

import typer

from objkv.cache.admission import Mode
from objkv.cache.switch import (
    AUTHOR_CHARS_MAX,
    MODES,
    Switch,
    clear_switch,
    read_switches,
    set_switch,
)
from objkv.cli.command import FINE, Session, command, require_role
from objkv.cli.options import Namespace, this_user, time_option
from objkv.errors import ConfigError
from objkv.ops.formats import span
from objkv.ops.listing import find_namespace

_CLEAR = "clear"
_LASTS_S_MAX = 366 * 86_400


@command
def admission(
    session: Session,
    mode: Annotated[
        str | None,
        typer.Argument(
            help=f"{', '.join(MODES)}, or {_CLEAR} to end the order; omit it to show the orders.",
            metavar="MODE",
        ),
    ] = None,
    for_: Annotated[
        float | None,
        time_option("Duration of the order", "--for", least=1, most=_LASTS_S_MAX, shown="1h"),
    ] = None,
    namespace: Namespace = None,
) -> int:
    """Switch loads off or on in running replicas, for a limited time.

    An order goes before every replica's own settings. Replicas follow it within a minute.
    """
    if mode not in (None, _CLEAR, *MODES):
        raise ConfigError(f"{mode}: give one of {', '.join(MODES)}, or {_CLEAR}")
    if mode in (None, _CLEAR) and for_ is not None:
        raise ConfigError("--for needs a mode, such as: objkv admission never --for 1h")
    if mode is not None:
        require_role(session, "admission never", f"admission {mode}")
    lasts_s = int(for_ or 3600)
    with session.backends() as backends:
        scope = None
        if namespace is not None:
            scope = find_namespace(backends.bulk, backends.index, namespace)
        now_s = int(time.time())
        if mode == _CLEAR:
            clear_switch(backends.bulk, scope, now_s=now_s)
        elif mode is not None:
            author = "".join(filter(str.isprintable, this_user()))[:AUTHOR_CHARS_MAX]
            order = Switch(cast("Mode", mode), scope, now_s + lasts_s, now_s, author)
            set_switch(backends.bulk, order)
        every = read_switches(backends.bulk)
    orders = [
        one
        for one in every
        if one.until_s > now_s and (scope is None or one.namespace in (None, scope))
    ]
    if session.out.document({"orders": orders}):
        return FINE
    if not orders:
        session.out.line("no order: each replica's own settings decide about loads")
    for one in orders:
        left = span(one.until_s - now_s)
        end = f"; {one.end()} ends it" if mode == _CLEAR else ""
        session.out.line(f"{one.scope()}: {one.describe()}, {left} left{end}")
    if mode is not None:
        where = session.config.public()["bulk_url"]
        session.out.line(f"replicas that use {where} follow within a minute")
    return FINE
