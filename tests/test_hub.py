"""The Hub's answers and failures, each in a fresh process against a Hub on 127.0.0.1."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, CONFIG, NEWER, QUANT, Hub, running_hub

from kvtool.errors import KvtoolError
from kvtool.hub import _within
from kvtool.hub_errors import Asked, explain

ASKED = Asked(repo_id="a/b", filename="c", revision="main", endpoint="https://hub.test")
SECRET = "hf_SecretSecretSecretSecretSecretSecr"

# Runs load_config with one preset of our own, and says on stdout what came of it.
PROBE = """
import json, sys, time, types
from dataclasses import asdict
setup, model, revision = json.loads(sys.argv[1])
preset = types.SimpleNamespace(name="preset-7b", hub_id="acme/typo", config={"from": "preset"},
                               source="a book", note="")
catalog = types.ModuleType("kvtool.catalog")
catalog.model_preset = lambda name: preset if name in setup["presets"] else None
catalog.model_presets = lambda: (types.SimpleNamespace(name="x", hub_id="acme/Typos-8B"),)
sys.modules["kvtool.catalog"] = catalog
exec(setup["code"])
from kvtool.config import load_config
from kvtool.errors import KvtoolError
start = time.monotonic()
try:
    out = asdict(load_config(model, revision=revision))
except KvtoolError as error:
    out = {"code": error.code, "message": error.message, "hint": error.hint}
    if setup["debug"]:
        raise
out |= {"seconds": time.monotonic() - start, "imported": "huggingface_hub" in sys.modules}
print(json.dumps(out))
"""

Load = Callable[..., dict[str, Any]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def start(
        model: str,
        *,
        revision: str | None = None,
        code: str = "",
        presets: tuple[str, ...] = (),
        debug: bool = False,
        **env: str,
    ) -> subprocess.CompletedProcess[str]:
        inherited = {k: os.environ[k] for k in ("PATH", "VIRTUAL_ENV") if k in os.environ}
        setup = {"code": code, "presets": presets, "debug": debug}
        return subprocess.run(
            [sys.executable, "-c", PROBE, json.dumps([setup, model, revision])],
            env={
                **inherited,
                "PYTHONPATH": str(Path(__file__).parents[1]),
                "HOME": str(tmp_path),
                "HF_HOME": str(tmp_path / "hf"),
                "HF_ENDPOINT": hub.url,
                "HF_TOKEN": SECRET,
                **env,
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
        )

    return start


@pytest.fixture
def load(run: Callable[..., subprocess.CompletedProcess[str]]) -> Load:
    def start(model: str, **options: Any) -> dict[str, Any]:
        done = run(model, **options)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert SECRET not in done.stdout
        out: dict[str, Any] = json.loads(done.stdout)
        assert "\n" not in out.get("message", "") + out.get("hint", "")
        return out

    return start


ANONYMOUS = {"HF_TOKEN": ""}


@pytest.mark.parametrize(
    ("repo", "env", "code", "message", "hint"),
    [
        ("gated-401", ANONYMOUS, "gated", "is gated", "/acme/gated-401, then set HF_TOKEN or run"),
        ("gated-403", {}, "gated", "is gated", "with the account of your token"),
        ("typo", ANONYMOUS, "not_found", "does not exist on the Hub or is private", "Typos-8B?"),
        ("typo-404", {}, "not_found", "does not exist", "your token needs access"),
        ("bad-token", {}, "bad_token", "does not accept it", "HF_TOKEN"),
        ("bad-token", ANONYMOUS, "not_found", "or is private", "hf auth login"),
        ("forbidden", {}, "forbidden", "forbids access", "permissions of your token"),
        ("disabled", {}, "disabled", "disabled on the Hub", "config.json"),
        ("no-revision", {}, "revision_not_found", "no revision 'main'", "leave --revision out"),
        ("no-config", {}, "no_config", "holds no config.json", "GGUF"),
        ("limited", ANONYMOUS, "rate_limited", "429", "wait 120 s, or set HF_TOKEN"),
        ("limited-rfc", {}, "rate_limited", "429", "wait 55 s"),
        ("error-500", {}, "server_error", "answered 500", "try again"),
        ("error-503", {}, "server_error", "answered 503", "try again"),
        ("proxied-407", {}, "proxy", "proxy", "HTTPS_PROXY"),
        ("teapot", {}, "hub_error", "answered 418", "HF_ENDPOINT"),
        ("cut", {}, "no_network", "cannot be reached: Server disconnected", "network"),
        ("circle", {}, "hub_error", "TooManyRedirects", "local config.json"),
        ("portal", {}, "hub_error", "is not a Hugging Face Hub", "HF_ENDPOINT"),
        ("large", {}, "too_large", "9,437,184 bytes", "8,388,608"),
        ("list", {}, "not_object", "an array", "model_type"),
        ("error-get", {}, "server_error", "answered 500", "try again"),
    ],
)
def test_each_refusal_has_its_own_two_lines_at_once(
    load: Load, repo: str, env: dict[str, str], code: str, message: str, hint: str
) -> None:
    out = load(f"acme/{repo}", **env)
    assert (out["code"], message in out["message"], hint in out["hint"]) == (code, True, True), out
    assert out["seconds"] < 3


def test_a_large_config_is_not_even_downloaded(hub: Hub, load: Load) -> None:
    load("acme/large")
    assert hub.asked("HEAD")
    assert not hub.asked("GET")


def test_a_hub_that_hangs_is_left_after_three_seconds(load: Load) -> None:
    out = load("acme/hang")
    assert out["code"] == "timeout"
    assert 2.5 < out["seconds"] < 7
    assert "HF_HUB_ETAG_TIMEOUT" in out["hint"]


BRIEF = {"HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
HANGING_NAME_SERVER = "import socket, time; socket.getaddrinfo = lambda *a, **k: time.sleep(30)"


def test_no_repetition_outlives_the_deadline(load: Load) -> None:
    cases = [("hang-get", ""), ("limited-get", ""), ("drip", ""), ("x", HANGING_NAME_SERVER)]
    with ThreadPoolExecutor() as pool:
        outs = list(pool.map(lambda case: load(f"acme/{case[0]}", code=case[1], **BRIEF), cases))
    assert [out["code"] for out in outs] == ["timeout"] * 4
    assert max(out["seconds"] for out in outs) < 7


def test_a_name_server_that_fails(load: Load) -> None:
    fail = (
        "import socket\ndef fail(*a, **k): raise socket.gaierror(-2, 'Name or service not known')\n"
        "socket.getaddrinfo = fail"
    )
    out = load("acme/plain", code=fail)
    assert out["code"] == "no_network"
    assert out["message"].endswith("cannot be reached: Name or service not known")


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_a_refused_connection_shows_no_password_of_the_endpoint(load: Load) -> None:
    address = closed_port()
    out = load("acme/plain", HF_ENDPOINT=f"http://me:pass@{address}")
    assert out["code"] == "no_network"
    assert out["message"] == f"{address} cannot be reached: Connection refused"


@pytest.mark.parametrize(
    ("env", "code", "message"),
    [
        ({"HF_TOKEN": "hf_bröken"}, "bad_token", "characters"),
        ({"HF_ENDPOINT": "hub.example"}, "bad_endpoint", "HF_ENDPOINT is not"),
        ({"HF_ENDPOINT": "http://127.0.0.1:99999"}, "bad_endpoint", "HF_ENDPOINT is not"),
        ({"SSL_CERT_FILE": "/no/such"}, "tls", "SSL_CERT_FILE names a file"),
        ({"HF_HUB_ETAG_TIMEOUT": "soon"}, "hub_library", "invalid literal for int"),
        ({"HTTP_PROXY": "gopher://127.0.0.1"}, "proxy", "its address"),
        ({"HF_HUB_CACHE": "/dev/null/hub"}, "cache", "Not a directory"),
    ],
)
def test_settings_that_cannot_work(
    load: Load, env: dict[str, str], code: str, message: str
) -> None:
    out = load("acme/plain", **env)
    assert (out["code"], message in out["message"]) == (code, True), out
    assert "hf_" not in out["message"] + out["hint"]


def test_a_traceback_does_not_show_the_token_either() -> None:
    LocalProtocolError = type("LocalProtocolError", (Exception,), {})

    def work() -> None:
        raise LocalProtocolError(f"Illegal header value b'Bearer {SECRET}'")

    with pytest.raises(KvtoolError) as caught:
        _within(work, ASKED, 5)
    assert caught.value.code == "bad_token"
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_wants_a_password(hub: Hub, load: Load, scheme: str) -> None:
    proxy = {f"{scheme.upper()}_PROXY": hub.url}
    out = load("acme/plain", HF_ENDPOINT=f"{scheme}://hub.invalid", **proxy)
    assert out["code"] == "proxy"
    assert hub.requests


def test_a_bad_certificate_is_not_called_a_broken_network() -> None:
    ConnectError = type("ConnectError", (type("NetworkError", (Exception,), {}),), {})
    error = ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate (_ssl.c:1006)")
    assert explain(error, ASKED).code == "tls"
    assert "hf_x" not in explain(ConnectError("no hf_xyz"), ASKED).message


@pytest.mark.parametrize("repo", ["plain", "renamed", "mirrored", "on-cdn"])
def test_a_config_comes_through_every_redirect(hub: Hub, load: Load, repo: str) -> None:
    out = load(f"acme/{repo}")
    assert out["config"] == CONFIG
    assert (out["name"], out["source"], out["notes"]) == (f"acme/{repo}", "hub", [])
    assert out["where"] == f"acme/{repo}@main (commit {COMMIT[:12]})"
    assert set(hub.cdn_authorizations) == ({None} if repo == "on-cdn" else set())


def test_the_revision_is_what_is_asked_for(hub: Hub, load: Load) -> None:
    out = load("acme/plain", revision="refs/pr/1")
    assert out["where"].startswith("acme/plain@refs/pr/1 (commit ")
    assert hub.requests[0] == ("HEAD", "/acme/plain/resolve/refs%2Fpr%2F1/config.json")
    assert load("acme/plain", revision="../../etc")["code"] == "bad_revision"


def test_modelopts_file_is_read_once_where_there_is_one(hub: Hub, load: Load) -> None:
    assert load("acme/quantised")["config"] == {**CONFIG, "hf_quant_config": QUANT}
    assert load("acme/plain")["config"] == CONFIG
    hub.requests.clear()
    load("acme/plain")
    assert hub.requests == [("HEAD", "/acme/plain/resolve/main/config.json")]


def test_modelopts_file_is_not_asked_for_if_the_config_says_it_itself(hub: Hub, load: Load) -> None:
    assert load("acme/says-itself")["config"] == {**CONFIG, "quantization_config": {}}
    assert {path.rpartition("/")[2] for _, path in hub.requests} == {"config.json"}


def test_a_terminal_sees_no_progress_bar_for_a_small_file(hub: Hub, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    code = "from kvtool.config import load_config; load_config('acme/says-itself')"
    env = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "TERM": "xterm"}
    root = str(Path(__file__).parents[1])
    subprocess.run(
        [sys.executable, "-c", code], env={**env, "PYTHONPATH": root}, stderr=theirs, timeout=30
    ).check_returncode()
    os.set_blocking(ours, False)
    with pytest.raises(BlockingIOError):
        os.read(ours, 100)
    os.close(ours)
    os.close(theirs)


def test_without_modelopts_file_the_config_stands_with_a_note(load: Load) -> None:
    out = load("acme/quantised-limited", HF_HUB_ETAG_TIMEOUT="1")
    assert out["seconds"] < 2.5
    assert out["config"] == CONFIG
    assert out["notes"][0].startswith("hf_quant_config.json was not read: ")


def test_a_cached_repository_needs_no_network(hub: Hub, load: Load) -> None:
    load("acme/plain")
    hub.requests.clear()
    offline = load("acme/plain", HF_HUB_OFFLINE="1")
    assert (offline["config"], offline["notes"], hub.requests) == (CONFIG, [], [])
    pinned = load("acme/plain", revision=COMMIT)
    assert (pinned["config"], hub.requests) == (CONFIG, [])
    gone = load("acme/plain", HF_ENDPOINT=f"http://{closed_port()}")
    assert gone["config"] == CONFIG
    assert gone["where"] == f"acme/plain@main (commit {COMMIT[:12]})"
    assert "Connection refused; config.json is the local cache's copy" in gone["notes"][0]


def test_a_newer_commit_is_fetched_and_an_older_one_serves_if_that_fails(
    hub: Hub, load: Load
) -> None:
    load("acme/plain")
    hub.commit = NEWER
    fail = (
        "import huggingface_hub\n"
        "def fail(*a, **k): raise OSError(28, 'No space left on device')\n"
        "huggingface_hub.hf_hub_download = fail"
    )
    out = load("acme/plain", code=fail)
    assert COMMIT[:12] in out["where"]
    assert "No space left on device" in out["notes"][0]
    assert NEWER[:12] in load("acme/plain")["where"]


def test_offline_and_not_cached(hub: Hub, load: Load) -> None:
    out = load("acme/plain", HF_HUB_OFFLINE="1")
    assert out["code"] == "offline"
    assert "unset HF_HUB_OFFLINE" in out["hint"]
    assert hub.requests == []


def test_a_preset_stands_in_for_its_hub_id(load: Load) -> None:
    out = load("acme/typo", presets=("acme/typo",), revision="v2")
    assert (out["config"], out["source"], out["name"]) == (
        {"from": "preset"}, "preset", "acme/typo",
    )  # fmt: skip
    assert out["where"] == "preset preset-7b (a book)"
    reason, ignored = out["notes"]
    assert reason == (
        "acme/typo does not exist on the Hub or is private; preset preset-7b is used instead"
    )
    assert ignored == "--revision v2 is ignored: the preset knows one revision"


def test_no_preset_stands_in_for_a_wrong_revision(load: Load) -> None:
    out = load("acme/no-revision", presets=("acme/no-revision",), revision="v9")
    assert out["code"] == "revision_not_found"
    assert "'v9'" in out["message"]


@pytest.mark.parametrize(
    "model", ["acme/a b", "acme/-x", "acme/x--y", "acme/x@main", "acme/x.git", "https://hf.co/a/b"]
)
def test_what_is_no_hub_id_is_refused_without_the_library(load: Load, model: str) -> None:
    out = load(model)
    assert out["code"] == "bad_id"
    assert not out["imported"]
