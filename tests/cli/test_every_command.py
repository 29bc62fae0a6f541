"""What all commands share, as tables: wrong usage, empty and unreachable stores, roles, secrets,
hostile names, Ctrl-C, and the names of namespaces and chunks."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread

import pytest

from objkv.cli.app import COMMANDS, all_commands
from objkv.keys.identity import Identity
from objkv.stores.base import Entry
from objkv.stores.local import LocalStore
from tests.cli.conftest import JSON_KEYS, Machine, Run, is_documented, refused
from tests.support.samples import IDENTITY, NAMESPACE, TOKENS, save_identity

TINY = "--model qwen3-32b"
PROMPT = json.dumps(list(TOKENS))


@pytest.fixture
def chunk(machine: Machine) -> str:
    """A stored chunk."""
    return machine.fill()[2]


def test_each_document_is_held_to_its_keys(run: Run) -> None:
    assert set(JSON_KEYS) == set(COMMANDS)
    document = run("access", "--role", "reader", "--json").document
    assert is_documented("access", document)
    assert not is_documented("access", {**document, "more": 1})
    assert not is_documented("access", {key: document[key] for key in list(document)[1:]})


WRONG = [
    ("verfy", "No such command 'verfy'"),
    ("access", "--role"),
    ("access --role wirter", "--role': 'wirter' is not one of"),
    ("access --role reader --tenant a* --bulk-url s3://bucket/objkv", "tenant"),
    ("admission sometimes", "auto, always, never"),
    ("admission --for 1h", "needs a mode"),
    ("admission never --for soon", "not a duration"),
    ("admission never --for 400d", "must be"),
    ("audit -n ffff", "no namespace matches ffff"),
    ("demo --bulk-url file:///elsewhere", "uses its own store"),
    ("diff {name} xyz", "xyz is not a file, and no namespace matches xyz"),
    ("diff {name} /nowhere/identity.json", "/nowhere/identity.json is not a file"),
    ("diff - -", "-"),
    ("doctor --tp 2", "--model"),
    ("doctor --model {home}", "give the folder of a model"),
    ("exporter --scan-every 30s", "must be at least 60 s"),
    ("gpu-check --model x --random", "brings a model of its own"),
    ("gpu-check --model {home}", "has no config.json"),
    ("ls --bulk --prefixes", "--bulk counts namespaces"),
    ("ls acme -n acme", "give the namespace once"),
    ("ls xyz", "no namespace matches xyz"),
    ("ls --limit 0", "--limit"),
    ("ls --config /nowhere.toml", "/nowhere.toml: No such file"),
    ("ls --nonsense", "No such option"),
    ("match --tokens a --text b", "only one of"),
    ("match --text b", "need --tokenizer"),
    ("match --tokens /nowhere", "/nowhere: No such file"),
    ("match --text a --tokenizer /nowhere", "/nowhere is not a file"),
    ("match --lora-digest xyz", "not hex digits"),
    ("match --tokens /dev/null", "the prompt is empty (no token ids)"),
    ("match", "'two' is not a token id"),
    ("pin abc", "give its 40 hex digits or at least the first 4"),
    ("pin 9999 --for soon", "not a duration"),
    ("pin {chunk} --for 999999999w", "within 30,000 years"),
    ("pin 9999 --tokens -", "either HASH or a prompt"),
    ("pin --list 9999", "--list takes no HASH and no prompt"),
    ("unpin xyz", "is not a hash"),
    ("unpin ab", "no pin starts with ab"),
    ("show xyzw", "xyzw"),
    ("size", "no model given"),
    ("size --model lama", "built-in model name; did you mean llama-3"),
    (f"size {TINY} --rate -1", "'--rate': Input should be greater than or equal to 0"),
    (f"size {TINY} --stored 2", "'--stored': Input should be less than or equal to 1"),
    (f"size {TINY} --tp 3", "3"),
    ("sweep --grace week", "is not a duration"),
    ("top --once --endpoint ftp://x", "http://HOST:PORT"),
    ("verify --apply", "--apply needs --quarantine"),
    ("verify -n ffff", "no namespace matches ffff"),
    ("verify --part 1/3", "--part"),
    ("verify --all --part 4/3", "--part"),
    ("verify --all --part x", "--part"),
    ("warm", "no prompts: name JSON Lines files"),
    ("warm /nowhere.jsonl --check", "/nowhere.jsonl: no such file"),
    ("warm -", "choose how to compute"),
    ("verify --all --sample 10", "give only one of --all and --sample"),
]


@pytest.mark.parametrize(("words", "told"), WRONG)
def test_wrong_usage_is_2_and_a_sentence(
    run: Run, home: Path, chunk: str, words: str, told: str
) -> None:
    given = words.format(name=NAMESPACE, chunk=chunk, home=home).split()
    ran = run(*given, stdin='"x"' if given[0] == "warm" else "1 two" if words == "match" else "1")
    refused(ran, told)
    first, *choices = ran.err.splitlines()
    assert first.startswith("Usage: ") or all(line.startswith("  ") for line in choices)


READING = ["ls", "ls --prefixes", "ls --bulk", "audit", "verify", "sweep", "rebuild"]


@pytest.mark.parametrize("words", READING)
def test_where_nothing_is_stored_it_is_said_where_and_made_nothing(
    run: Run, home: Path, words: str
) -> None:
    ran = run(*words.split())
    assert (ran.code, ran.out.startswith("nothing is stored in ")) == (0, True)
    assert f"{home}/objkv/" in ran.out
    assert not (home / "objkv" / "chunks").exists()
    elsewhere = ("--bulk-url", f"file://{home}/none/zz", "--index-url", f"sqlite://{home}/i")
    refused(run(*words.split(), *elsewhere), "no such folder")
    assert not (home / "none").exists()


@pytest.mark.parametrize(
    "words",
    [
        *("admission never", "admission clear", "bench --quick", "pin --list", f"pin {'a' * 40}"),
        *("unpin abcd", "show abcd", "match", "rebuild --apply --index-url bulk:"),
    ],
)
def test_a_mistyped_folder_is_refused_and_not_created(run: Run, home: Path, words: str) -> None:
    refused(run(*words.split(), "--bulk-url", f"file://{home}/typo", stdin="1"), "no such folder")
    assert not (home / "typo").exists()


INDEX = [
    *("ls", "ls --prefixes", "match", "show abcd", "diff ab cd", "audit"),
    *("verify --all", "sweep", "rebuild", "warm - --check"),
]


@pytest.mark.parametrize("words", INDEX)
def test_an_index_that_cannot_be_reached_is_3_with_a_remedy_and_without_its_password(
    run: Run, words: str
) -> None:
    ran = run(*words.split(), "--index-url", "redis://me:hunter2@127.0.0.1:1", stdin="1 2 3")
    refused(ran, "objkv: redis index", "; objkv doctor shows what works\n", code=3)
    assert ran.err.count("\n") == 1
    assert "hunter2" not in ran.err


CHANGING = {
    "pin {chunk}": "pin needs the role writer, and role is reader",
    "unpin {chunk}": "unpin needs the role sweeper, and role is reader",
    "admission never": "set OBJKV_ROLE=writer",
}


@pytest.mark.parametrize("words", CHANGING)
def test_a_reader_changes_nothing(
    run: Run, machine: Machine, chunk: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {entry.key for entry in machine.bulk.scan("")}
    monkeypatch.setenv("OBJKV_ROLE", "reader")
    refused(run(*words.format(chunk=chunk).split()), CHANGING[words])
    assert {entry.key for entry in machine.bulk.scan("")} == before


@pytest.mark.parametrize("words", ["ls --bulk", "audit", "diff evil default/tiny", "verify"])
def test_names_from_the_store_cannot_drive_the_terminal(
    run: Run, machine: Machine, chunk: str, words: str
) -> None:
    hostile = replace(IDENTITY, model="\x1b]0;owned\x07[bold]x[/bold]", tenant="evil\x9b1m")
    save_identity(machine.bulk, hostile)
    ran = run(*words.split())
    assert ran.code in (0, 1)
    assert not {"\x1b", "\x07", "\x9b"} & set(ran.out + ran.err)


@pytest.mark.parametrize("words", ["ls --bulk", "audit", "verify --all", "sweep", "rebuild"])
@pytest.mark.parametrize("where", ["anywhere", "in a thread of the walk"])
def test_ctrl_c_ends_with_130_a_word_and_no_result_as_if_it_were_whole(
    run: Run, chunk: str, words: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    scan = LocalStore.scan

    def interrupted(store: LocalStore, prefix: str) -> Iterator[Entry]:
        if where == "anywhere" or current_thread() is not main_thread():
            raise KeyboardInterrupt
        return scan(store, prefix)

    monkeypatch.setattr(LocalStore, "scan", interrupted)
    if where == "anywhere":
        monkeypatch.setattr(LocalStore, "folders", interrupted)
    ran, in_json = run(*words.split()), run(*words.split(), "--json")
    if words.split()[0] in ("verify", "sweep", "rebuild"):
        assert (ran.code, ran.out.endswith("incomplete, interrupted\n")) == (130, True)
        document = in_json.document
        assert (in_json.code, document["complete"], document["ending"]) == (
            130, False, "interrupted",
        )  # fmt: skip
    else:
        refused(ran, "objkv: interrupted", code=130)
        refused(in_json, "objkv: interrupted", code=130)


SPELLINGS = ("acme/tiny", "default/ti", NAMESPACE[:3])
OTHER = replace(IDENTITY, model="Qwen/Qwen3-0.6B", tenant="blue")
BY_NAME = {
    "admission": "admission -n {name} --json",
    "audit": "audit -n {name} --json",
    "diff": "diff {name} {name} --json",
    "ls": "ls {name} --json",
    "ls -n": "ls -n {name} --json",
    "ls --bulk": "ls --bulk {name} --json",
    "ls --tree": "ls --tree {name} --json",
    "match": "match -n {name} --json",
    "pin": "pin {leaf} -n {name} --json",
    "pin --list": "pin --list -n {name} --json",
    "unpin": "unpin {leaf} -n {name} --json",
    "rebuild": "rebuild -n {name} --json",
    "show": "show {leaf} -n {name} --json",
    "sweep": "sweep -n {name} --json",
    "verify": "verify -n {name} --json",
    "warm": "warm - --check -n {name} --json",
}

NAMED = ("audit", "diff", "ls", "ls --bulk", "match", "pin", "show", "unpin")
"""Commands whose documents name the namespace."""


@pytest.fixture
def leaf(machine: Machine) -> str:
    """The first digits of a stored chunk. Its namespace is not the only one."""
    save_identity(machine.bulk, OTHER)
    return machine.fill()[2][:5]


@pytest.mark.parametrize("command", BY_NAME)
def test_a_namespace_has_its_names_in_every_command(run: Run, leaf: str, command: str) -> None:
    for name in SPELLINGS:
        if command == "unpin":
            assert run("pin", leaf).code == 0
        words = BY_NAME[command].format(name=name, leaf=leaf)
        ran = run(*words.split(), stdin=PROMPT)
        assert (ran.code, ran.err) == (0, ""), name
        if command in NAMED:
            assert NAMESPACE in ran.out
        assert OTHER.namespace() not in ran.out


def test_every_command_with_a_namespace_has_the_short_option() -> None:
    found = set()
    for path, command in all_commands():
        for parameter in command.params:
            if "--namespace" in parameter.opts:
                assert "-n" in parameter.opts, path
                found.add(path.removeprefix("objkv "))
    with_agents = {"prefetch"}  # its names are tested with an agent, in test_prefetch.py
    named = {line.split()[0] for line in BY_NAME.values() if "-n" in line.split()}
    assert found == named | with_agents


def test_diff_takes_a_model_for_a_model_and_a_file_for_a_file(
    run: Run, leaf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("Qwen3-0.6B", "Qwen/Qwen3-0.6B", "blue/Qwen3-0.6B"):
        document = run("diff", name, "acme/tiny", "--json").document
        assert [document[side]["namespace"] for side in "ab"] == [OTHER.namespace(), NAMESPACE]
    identity: Identity = replace(IDENTITY, tenant="red")
    Path("Qwen3-0.6B").write_bytes(identity.canonical())
    document = run("diff", "Qwen3-0.6B", "acme/tiny", "--json").document
    assert document["a"]["namespace"] == identity.namespace()
