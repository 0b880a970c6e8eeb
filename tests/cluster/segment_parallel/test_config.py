"""Options of segment parallelism and of its router: what is allowed, and what a refusal says."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from vllm_hypic.cli import main
from vllm_hypic.config.router import RouterConfig
from vllm_hypic.config.segment_parallel import Address, SegmentParallelConfig
from vllm_hypic.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "how-it-works" / "segment-parallelism.md"
GOOD = {"listen": "tcp://127.0.0.1:7100", "events": "tcp://127.0.0.1:7101"}


def test_survives_a_round_trip() -> None:
    options = {
        "listen": "tcp://0.0.0.0:7100",
        "events": "tcp://[::]:7101",
        "advertise": "tcp://node-3.cluster.local:30100",
        "advertise_events": "tcp://[fd00::3]:30101",
        "secret_file": "/run/secrets/hypic",
        "deadline_s": 30,
        "max_awaited_fraction": 0.25,
        "transport": "nixl",
        "nixl_bytes": 1 << 30,
    }
    config = SegmentParallelConfig.from_mapping(options)
    assert config.to_mapping() == options
    assert (config.receiver_url, config.events_url) == (options["advertise"], options["advertise_events"])


def test_others_are_told_what_is_bound_when_nothing_else_is_said() -> None:
    config = SegmentParallelConfig.from_mapping(GOOD)
    assert (config.receiver_url, config.events_url) == (GOOD["listen"], GOOD["events"])
    assert config.deadline_s == 120.0 and config.secret_file is None and config.transport == "tcp"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "[::1]"])
def test_loopback_needs_no_secret(host: str) -> None:
    SegmentParallelConfig.from_mapping({"listen": f"tcp://{host}:7100", "events": f"tcp://{host}:7101"})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"listen": 7100}, "listen=7100: expected tcp://ADDRESS:PORT"),
        ({"listen": "127.0.0.1:7100"}, "listen='127.0.0.1:7100': expected tcp://ADDRESS:PORT"),
        ({"listen": "tcp://127.0.0.1:0"}, "port 1 to 65535"),
        ({"listen": "tcp://127.0.0.1:65536"}, "port 1 to 65535"),
        ({"listen": "tcp://127.0.0.1:7100\n"}, "expected tcp://ADDRESS:PORT"),
        ({"listen": "tcp://*:7100"}, "expected tcp://ADDRESS:PORT"),
        ({"listen": "tcp://[::zz]:7100"}, "expected tcp://ADDRESS:PORT"),
        ({"listen": "tcp://[1:2]:7100"}, "expected an IPv6 address"),
        ({"listen": "tcp://-x-:7100"}, "an IP address or a host name"),
        ({"listen": "tcp://node:7100"}, "an IP address of this machine (or localhost), not a name"),
        ({"listen": "tcp://10.0.0.3:7100"}, "a loopback address such as tcp://127.0.0.1:7100, or set secret"),
        ({"events": "tcp://0.0.0.0:7101"}, "events='tcp://0.0.0.0:7101': expected a loopback address"),
        ({"events": "tcp://[::ffff:127.0.0.1]:7101"}, "expected a loopback address"),
        ({"events": GOOD["listen"]}, "a port other than the port of listen"),
        ({"listen": "tcp://0.0.0.0:7100", "secret_file": "s"}, "one interface, or set advertise"),
        ({"events": "tcp://[::]:7101", "secret_file": "s"}, "or set advertise_events"),
        ({"advertise": "tcp://0.0.0.0:7100"}, "advertise='tcp://0.0.0.0:7100': expected an address that"),
        ({"advertise": "http://a:1"}, "advertise='http://a:1': expected tcp://ADDRESS:PORT"),
        ({"secret_file": ""}, "secret_file='': expected a path, or null"),
        ({"secret_file": 5}, "secret_file=5: expected a path, or null"),
        ({"deadline_s": 0}, "deadline_s=0: expected a number of seconds > 0"),
        ({"deadline_s": True}, "deadline_s=True: expected a number"),
        ({"deadline_s": float("nan")}, "deadline_s=nan: expected a number"),
        ({"deadline_s": "5"}, "deadline_s='5': expected a number"),
        ({"max_awaited_fraction": 1.1}, "max_awaited_fraction=1.1: expected a number from 0 to 1"),
        ({"transport": "rdma"}, "transport='rdma': expected tcp or nixl"),
        ({"transport": None}, "transport=None: expected tcp or nixl"),
        ({"nixl_bytes": (1 << 20) - 1}, "nixl_bytes=1048575: expected a number of bytes from 1048576"),
        ({"nixl_bytes": "1GiB"}, "nixl_bytes='1GiB': expected a number of bytes"),
        ({"port": 1}, "unknown option 'port'; expected one of advertise, advertise_events, deadline_s"),
    ],
)
def test_a_refusal_names_the_value_and_what_is_allowed(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        SegmentParallelConfig.from_mapping({**GOOD, **change})
    assert str(refusal.value).startswith("hypic config: segment_parallel")
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *((bad, "segment_parallel=.*: expected an object") for bad in (None, GOOD["listen"], ["listen"])),
        ({"events": GOOD["events"]}, "segment_parallel.listen is missing"),
        ({"listen": GOOD["listen"]}, "segment_parallel.events is missing"),
    ],
)
def test_the_section_is_an_object_and_addresses_are_not_guessed(options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SegmentParallelConfig.from_mapping(options)


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("tcp://localhost:1", "tcp://127.0.0.1:1"),
        ("tcp://[0:0:0:0:0:0:0:1]:2", "tcp://[::1]:2"),
        ("tcp://Node-3.cluster:3", "tcp://node-3.cluster:3"),
    ],
)
def test_an_address_has_one_form(url: str, plain: str) -> None:
    assert Address.parse(url).url == plain and Address.parse(plain) == Address.parse(url)


@pytest.mark.parametrize("url", ["tcp://127.1:1", "tcp://0x7f000001:1", "tcp://2130706433:1", "tcp://node:1"])
def test_what_may_stand_for_another_machine_is_no_loopback(url: str) -> None:
    assert not Address.parse(url).loopback


def test_the_page_has_the_defaults_that_it_quotes() -> None:
    """All options with their defaults are in the generated reference."""
    fields = (*dataclasses.fields(RouterConfig), *dataclasses.fields(SegmentParallelConfig))
    defaults = {field.name: field.default for field in fields}
    quoted = re.findall(r"`(?:--)?([a-z][a-z_-]+)` \((\d[\d.]*)\)", PAGE.read_text())
    told = {name.replace("-", "_"): float(value) for name, value in quoted}
    assert len(told) == len(quoted) == 6 and told == {name: defaults[name] for name in told}


ONE, TWO = ["--prefill", "http://127.0.0.1:1"], ["--combine", "http://127.0.0.1:2"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--combine URL, or --pool URL"),
        (ONE, "--combine URL"),
        (TWO, "--prefill URL"),
        ([*ONE, "--combine", "127.0.0.1:8000"], "'127.0.0.1:8000': expected http://HOST:PORT"),
        ([*ONE, "--combine", "http://h:99999"], "'http://h:99999': expected http://HOST:PORT"),
        ([*ONE, "--combine", "http://h:1/?a=b"], "expected http://HOST:PORT"),
        ([*ONE, *ONE, *TWO], "is given twice"),
        ([*ONE, "--pool", "http://h:1"], "--pool cannot be combined with --prefill or --combine"),
        ([*ONE, *TWO, "--min-gain", "2"], "--min-gain 2.0: expected a number from 0 to 1, or -1"),
        ([*ONE, *TWO, "--min-gain", "-0.5"], "--min-gain -0.5: expected a number from 0 to 1, or -1"),
        ([*ONE, *TWO, "--min-gain", "nan"], "--min-gain nan: expected a number from 0 to 1, or -1"),
        ([*ONE, *TWO, "--deadline-s", "0"], "--deadline-s 0.0: expected a finite number > 0"),
        ([*ONE, *TWO, "--deadline-s", "inf"], "--deadline-s inf"),
        ([*ONE, *TWO, "--segments-per-worker", "0"], "--segments-per-worker 0: expected 1 to 64"),
        ([*ONE, *TWO, "--straggler-factor", "0.5"], "--straggler-factor 0.5: expected a finite number >= 1"),
        ([*ONE, *TWO, "--silence-s", "1"], "--silence-s 1.0: expected a finite number >= 2"),
        ([*ONE, *TWO, "--port", "0"], "0 is not in the range"),
        ([*ONE, *TWO, "--secret-file", "/nowhere"], "secret_file='/nowhere': cannot be read"),
    ],
)
def test_bad_options_are_named(options: list[str], said: str) -> None:
    found = CliRunner().invoke(main, ["router", *options])
    assert found.exit_code == 2 and said in " ".join(found.output.split())


def test_a_short_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("short")
    found = CliRunner().invoke(main, ["router", *ONE, *TWO, "--secret-file", str(tmp_path / "secret")])
    assert found.exit_code == 2 and "expected 32" in found.output


def test_the_command_is_listed() -> None:
    assert "router" in CliRunner().invoke(main, ["--help"]).output


def loaded_after(code: str, modules: str) -> str:
    """Which of ``modules`` are loaded after ``code`` ran in a fresh interpreter."""
    code += f"\nimport sys; print(*(m for m in {modules.split()} if m in sys.modules))"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_other_commands_do_not_load_the_router() -> None:
    code = (
        "from click.testing import CliRunner; from vllm_hypic.cli import main\n"
        "assert CliRunner().invoke(main, ['cache', '--help']).exit_code == 0"
    )
    assert loaded_after(code, "uvicorn zmq") == ""
