"""One vocabulary of options: forms of output, options before the command, durations, sizes, and
outputs that cannot be written."""

from pathlib import Path

from tests.cli.conftest import Machine, Run, refused


def test_every_form_of_output_is_an_option_of_every_command(run: Run, machine: Machine) -> None:
    machine.fill()
    for form in (("--json",), ("-o", "json"), ("--output=json", "--json")):
        assert run("ls", *form).document["namespaces"][0]["payloads"] == 6
    tables = [run("ls", "--prefixes", *form).out for form in ((), ("-o", "table"), ("-o", "wide"))]
    assert len(set(tables)) == 1, "a pipe gets everything"
    for form in ("table", "wide"):
        refused(run("ls", "--json", "-o", form), f"--json and -o {form} exclude each other")
        refused(run("--json", "-o", form, "ls"), f"--json and -o {form} exclude each other")
    refused(run("ls", "-o", "yaml"), "'yaml' is not one of", "wide")


def test_common_options_may_stand_before_the_command(
    run: Run, machine: Machine, tmp_path: Path
) -> None:
    machine.fill()
    chunks, index = tmp_path / "objkv" / "chunks", tmp_path / "objkv" / "index.sqlite"
    there = (f"--bulk-url=file://{chunks}", "--index-url", f"sqlite://{index}")
    settings = tmp_path / "settings.toml"
    settings.write_text("ttl_s = 77\n")
    for words in (("ls", *there, "--json"), (*there, "--json", "ls"), (*there, "-o", "json", "ls")):
        [found] = run(*words).document["namespaces"]
        assert found["payloads"] == 6
    listed = run("--config", str(settings), "--no-color", "--json", "doctor").document["settings"]
    assert [one["value"] for one in listed if one["name"] == "ttl_s"] == [77]
    refused(run("--config", "/nowhere.toml", "ls"), "/nowhere.toml")
    assert run("--index-url", "redis://127.0.0.1:1", "ls", *there, "--json").code == 0
    assert "prefixes" not in run("--json", "ls", "--prefixes", "-o", "table").out
    assert run("-o", "table", "ls", *there, "--json").document["source"] == "index"
    assert "Traceback (most" in run("ls", "--debug", "--index-url", "redis://127.0.0.1:1").err


def test_durations_have_units_and_plain_numbers_are_seconds(run: Run) -> None:
    for given, found in {
        "--ttl 2h --sweep-every 1d --used 90m": (7_200, 86_400, 5_400),
        "--ttl 7200 --sweep-every 0 --used 1.5": (7_200, 0, 1.5),
    }.items():
        words = ("size", "--model", "llama-3.1-8b", "--json", *given.split())
        load = run(*words).document["load"]
        assert (load["ttl_s"], load["sweep_every_s"], load["used_s"]) == found
