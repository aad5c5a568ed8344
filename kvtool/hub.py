"""One small file from the Hugging Face Hub or its local cache, within a few seconds or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kvtool import __version__
from kvtool.errors import KvtoolError
from kvtool.hub_errors import (
    Asked,
    bad_endpoint,
    bad_header,
    explain,
    no_safetensors,
    not_a_hub,
    offline,
)

T = TypeVar("T")

_REPO_ID = re.compile(r"\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b", re.ASCII)

ANSWER_TIMEOUT_S = 3
DOWNLOAD_TIMEOUT_S = 3
SLACK_S = 2
HEADERS_TIMEOUT_S = 60
"""For the headers of all files of a checkpoint: a request or two for each of a hundred files."""
LONGEST_WAIT_S = 86_400
_QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
}

DEFINITE = ("revision_not_found", "no_config", "too_large")
"""Answers from the Hub itself about this file: a copy in the cache does not overrule them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file in the Hub's local cache, its commit, and why the cache had to do (or None)."""

    path: Path
    commit: str
    stale: str | None = None


def fetch(repo_id: str, filename: str, *, revision: str | None, max_bytes: int) -> HubFile:
    """The file as the Hub has it now; as the cache has it if the Hub cannot be asked."""
    _check_id(repo_id)
    _check_revision(revision)
    _load_library()
    asked = _asked(repo_id, filename, revision or "main")
    # Before any request: a download that breaks off has moved the branch in the cache already.
    cached = _cached(asked)
    if _is_offline():
        if cached is None:
            raise offline(asked)
        return cached
    if cached is not None and cached.commit == revision:
        return cached
    try:
        return _within(lambda: _download(asked, cached, max_bytes), asked, _deadline())
    except KvtoolError as error:
        if cached is None or error.code in DEFINITE:
            raise
        return HubFile(path=cached.path, commit=cached.commit, stale=error.message)


def fetch_beside(beside: HubFile, repo_id: str, filename: str) -> HubFile | None:
    """Another file of the same commit, or None if there is none (or nobody to ask)."""
    from huggingface_hub import try_to_load_from_cache

    asked = _asked(repo_id, filename, beside.commit)
    known = try_to_load_from_cache(repo_id, filename, revision=beside.commit)
    if isinstance(known, str):
        return HubFile(path=Path(known), commit=beside.commit)
    # Anything else but None is the cache's way to say that this commit has no such file.
    if known is not None or beside.stale is not None or _is_offline():
        return None
    try:
        # Most repositories have none: not worth more than the wait for one answer.
        path = _within(lambda: _download_to_cache(asked), asked, _answer_timeout())
    except KvtoolError as error:
        if error.code == "no_config":
            return None
        raise
    return HubFile(path=path, commit=beside.commit)


def fetch_headers(repo_id: str, *, revision: str | None) -> dict[str, Mapping[str, Any]]:
    """The headers of a repository's safetensors files, by file: name → dtype, shape, data_offsets."""
    _check_id(repo_id)
    _check_revision(revision)
    _load_library()
    asked = _asked(repo_id, "model.safetensors", revision or "main")
    if _is_offline():
        raise offline(asked)
    try:
        return _within(lambda: _headers(asked), asked, max(_deadline(), HEADERS_TIMEOUT_S))
    except KvtoolError as error:
        if error.code == "no_config":  # there is a repository, and no such file
            raise no_safetensors(f"{repo_id} at revision '{asked.revision}'") from error
        raise


def _headers(asked: Asked) -> dict[str, Mapping[str, Any]]:
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    try:
        found = get_safetensors_metadata(asked.repo_id, revision=asked.revision)
    except NotASafetensorsRepoError:
        # It says so of repositories that are missing or private, too: the file's own answer tells.
        _ask(asked)
        raise no_safetensors(asked.repo_id) from None
    except SafetensorsParsingError as error:
        raise bad_header(f"a safetensors file of {asked.repo_id}") from error
    return {
        name: {
            tensor: {"dtype": one.dtype, "shape": one.shape, "data_offsets": list(one.data_offsets)}
            for tensor, one in file.tensors.items()
        }
        for name, file in found.files_metadata.items()
    }


def _load_library() -> None:
    # Read once, at the import. The telemetry would ask the Hub for one more file before ours and
    # wait for it; bars and warnings ("Retrying in 1s") would stand between our lines.
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if os.environ.get("HF_ENDPOINT") == "":
        del os.environ["HF_ENDPOINT"]  # empty is unset, which the library takes for an address
    _check_endpoint(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        import huggingface_hub.constants  # noqa: F401
    except (ImportError, ValueError) as error:
        # ValueError: HF_HUB_ETAG_TIMEOUT=soon and the like.
        raise KvtoolError(
            f"huggingface_hub cannot be loaded: {' '.join(str(error).split())[:120]}",
            "check the HF_… environment variables and `pip install -U huggingface_hub`",
            code="hub_library",
        ) from error


def _check_endpoint(address: str) -> None:
    # Before the import: the library prints on standard output what it thinks of a bad one.
    try:
        parts = urlsplit(address)
        good = parts.scheme in ("http", "https") and bool(parts.netloc)
        _ = parts.port  # raises for one out of range
    except ValueError:
        good = False
    if not good:
        raise bad_endpoint()


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _asked(repo_id: str, filename: str, revision: str) -> Asked:
    from huggingface_hub import constants

    return Asked(repo_id=repo_id, filename=filename, revision=revision, endpoint=constants.ENDPOINT)


def _check_id(repo_id: str) -> None:
    # The rules of huggingface_hub's validate_repo_id, without the wait for its import.
    if _REPO_ID.fullmatch(repo_id) and not re.search(r"--|\.\.|\.git$", repo_id):
        return
    raise KvtoolError(
        f"'{repo_id}' is neither a file nor a Hub id",
        "a Hub id is org/name, of letters, digits, '-', '_' and '.'; a branch or a commit goes"
        " into --revision",
        code="bad_id",
    )


def _check_revision(revision: str | None) -> None:
    # Git's own rules, more or less; a revision also becomes part of a path in the cache.
    if revision is None or (
        re.fullmatch(r"[\w.+@-][\w./+@-]{0,199}", revision) and ".." not in revision
    ):
        return
    shown = "".join(c if c.isprintable() else "?" for c in revision[:80])
    raise KvtoolError(
        f"'{shown}' cannot be a revision",
        "--revision takes a branch, a tag or a commit of the repository",
        code="bad_revision",
    )


def _cached(asked: Asked) -> HubFile | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(asked.repo_id, asked.filename, revision=asked.revision)
    except (OSError, ValueError):
        return None
    return (
        HubFile(path=Path(path), commit=Path(path).parent.name) if isinstance(path, str) else None
    )


def _ask(asked: Asked) -> Any:
    """What the Hub says of a file: its size, its commit."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    return get_hf_file_metadata(
        hf_hub_url(asked.repo_id, asked.filename, revision=asked.revision),
        timeout=_answer_timeout(),
        library_name="kvtool",
        library_version=__version__,
    )


def _download(asked: Asked, cached: HubFile | None, max_bytes: int) -> HubFile:
    # Asked first and alone: hf_hub_download repeats a request that fails, for minutes, and then
    # no longer says why it failed.
    found = _ask(asked)
    if found.commit_hash is None or found.etag is None:
        raise not_a_hub(asked)
    if found.size is not None and found.size > max_bytes:
        raise KvtoolError(
            f"{asked.filename} of {asked.repo_id} has {found.size:,} bytes",
            f"a model's config has a few thousand; more than {max_bytes:,} are not read",
            code="too_large",
        )
    if cached is not None and cached.commit == found.commit_hash:
        return cached
    path = _download_to_cache(asked)
    return HubFile(path=path, commit=path.parent.name)


def _download_to_cache(asked: Asked) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(
        hf_hub_download(
            asked.repo_id,
            asked.filename,
            revision=asked.revision,
            etag_timeout=_answer_timeout(),
            library_name="kvtool",
            library_version=__version__,
        )
    )


def _answer_timeout() -> int:
    # huggingface_hub has read the same text as an int when it was imported.
    return _seconds("HF_HUB_ETAG_TIMEOUT") or ANSWER_TIMEOUT_S


def _deadline() -> int:
    return _answer_timeout() + (_seconds("HF_HUB_DOWNLOAD_TIMEOUT") or DOWNLOAD_TIMEOUT_S) + SLACK_S


def _seconds(name: str) -> int:
    return min(max(int(os.environ.get(name) or 0), 0), LONGEST_WAIT_S)


def _within(work: Callable[[], T], asked: Asked, seconds: int) -> T:
    """The result of `work`, or its failure in two lines; late work is left to a daemon thread.

    Time-outs of single reads bound neither a name server that hangs, nor an answer that drips,
    nor huggingface_hub's own repetitions.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            outcome.set_exception(error)

    Thread(target=run, name="kvtool-hub", daemon=True).start()
    try:
        error = outcome.exception(timeout=seconds)
    except TimeoutError as late:
        error = late
    if error is None:
        return outcome.result()
    problem = explain(error, asked)
    # An error about the token may quote it: no traceback may show that one.
    raise problem from (None if problem.code == "bad_token" else error)
