"""One vocabulary of options: forms of output, options before the command, durations, sizes, and
outputs that cannot be written."""

from tests.cli.conftest import Machine, Run, refused


def test_every_form_of_output_is_an_option_of_every_command(run: Run, machine: Machine) -> None:
    machine.fill()
    for form in (("--json",), ("-o", "json"), ("--output=json", "--json")):
        assert run("ls", *form).document["namespaces"][0]["payloads"] == 6
    tables = [run("ls", "--prefixes", *form).out for form in ((), ("-o", "table"), ("-o", "wide"))]
    assert len(set(tables)) == 1, "a pipe gets everything"
    for form in ("table", "wide"):
        refused(run("ls", "--json", "-o", form), f"--json and -o {form} exclude each other")
    refused(run("ls", "-o", "yaml"), "'yaml' is not one of", "wide")


def test_durations_have_units_and_plain_numbers_are_seconds(run: Run) -> None:
    for given, found in {
        "--ttl 2h --sweep-every 1d --used 90m": (7_200, 86_400, 5_400),
        "--ttl 7200 --sweep-every 0 --used 1.5": (7_200, 0, 1.5),
    }.items():
        words = ("size", "--model", "llama-3.1-8b", "--json", *given.split())
        load = run(*words).document["load"]
        assert (load["ttl_s"], load["sweep_every_s"], load["used_s"]) == found
