"""What went wrong between us and the Hub: one exception in, two lines for people out."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvtool.errors import KvtoolError

CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
LOGIN = "set HF_TOKEN or run `hf auth login`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked of the Hub, for the wording of an answer that did not come."""

    repo_id: str
    filename: str
    revision: str
    endpoint: str

    @property
    def host(self) -> str:
        """The Hub's host and port; never the user and password a URL may hold."""
        return urlsplit(self.endpoint).netloc.rpartition("@")[2] or "HF_ENDPOINT"

    @property
    def page(self) -> str:
        """The address of the repository's page."""
        return f"{urlsplit(self.endpoint).scheme or 'https'}://{self.host}/{self.repo_id}"


def explain(error: BaseException, asked: Asked) -> KvtoolError:
    """The two lines for anything that fetching a file can raise."""
    if isinstance(error, KvtoolError):
        return error
    kinds = _kinds(error)
    if "LocalEntryNotFoundError" in kinds and error.__cause__ is not None:
        return explain(error.__cause__, asked)
    response = getattr(error, "response", None)
    if response is not None:
        sent_token = "authorization" in response.request.headers
        return _from_answer(response.status_code, response.headers, sent_token, asked)
    return _from_transport(error, kinds, asked)


def offline(asked: Asked) -> KvtoolError:
    """HF_HUB_OFFLINE is set and the cache does not hold the file."""
    return KvtoolError(
        f"{asked.repo_id} is not in the local cache, and HF_HUB_OFFLINE is set",
        f"unset HF_HUB_OFFLINE, or run `hf download {asked.repo_id} {asked.filename}` where there"
        " is a network",
        code="offline",
    )


def not_a_hub(asked: Asked) -> KvtoolError:
    """Something answered, but without the headers that every Hub sends."""
    return KvtoolError(
        f"what answers at {asked.host} is not a Hugging Face Hub",
        "check HF_ENDPOINT, and whether a proxy or a login page of the network answers instead",
        code="hub_error",
    )


def no_safetensors(where: str) -> KvtoolError:
    """Nothing that can be read: pickled weights (*.bin) would have to be run."""
    return KvtoolError(
        f"{where} has no safetensors files",
        "other formats (*.bin, *.pth, *.gguf) are not read: give --weights 16GiB, or name a"
        " repository or a folder with safetensors",
        code="no_safetensors",
    )


def bad_header(where: str, why: str = "its header is not one of the format") -> KvtoolError:
    """A file that says it is safetensors, and is not."""
    return KvtoolError(
        f"{where} cannot be read: {why}",
        "download it again, or give --weights 16GiB",
        code="bad_safetensors",
    )


def _kinds(error: BaseException) -> set[str]:
    # By name: huggingface_hub 1.x raises httpx's classes, 2.x those of httpx2.
    return {kind.__name__ for kind in type(error).__mro__}


def _from_answer(
    status: int, headers: Mapping[str, str], sent_token: bool, asked: Asked
) -> KvtoolError:
    code = headers.get("X-Error-Code")
    if code == "GatedRepo":
        return _gated(sent_token, asked)
    if code == "RevisionNotFound":
        return KvtoolError(
            f"{asked.repo_id} has no revision '{asked.revision}'",
            f"see the branches and tags at {asked.page}/tree/main, or leave --revision out",
            code="revision_not_found",
        )
    if code == "EntryNotFound":
        return KvtoolError(
            f"{asked.repo_id} holds no {asked.filename} at revision '{asked.revision}'",
            "name the repository with the original weights: GGUF, adapter and ONNX repositories"
            " often have no config.json",
            code="no_config",
        )
    if code == "RepoNotFound":
        return _not_found(sent_token, asked)
    return _from_status(status, headers, sent_token, asked)


def _gated(sent_token: bool, asked: Asked) -> KvtoolError:
    then = (
        " with the account of your token (a fine-grained token also needs the permission to read"
        " gated repositories)"
        if sent_token
        else f", then {LOGIN}"
    )
    return KvtoolError(
        f"{asked.repo_id} is gated: the Hub gives it to those who accepted its licence",
        f"accept the licence at {asked.page}{then}",
        code="gated",
    )


def _not_found(sent_token: bool, asked: Asked) -> KvtoolError:
    access = (
        "if it is private, your token needs access to it"
        if sent_token
        else f"if it is private, {LOGIN}"
    )
    return KvtoolError(
        f"{asked.repo_id} does not exist on the Hub or is private",
        f"check the spelling; {access}",
        code="not_found",
    )


def _from_status(
    status: int, headers: Mapping[str, str], sent_token: bool, asked: Asked
) -> KvtoolError:
    if headers.get("X-Error-Message") == "Access to this resource is disabled.":
        return KvtoolError(
            f"{asked.repo_id} has been disabled on the Hub",
            f"see {asked.page}, or use a copy of its config.json",
            code="disabled",
        )
    if status == 401:
        return bad_token("the Hub does not accept it") if sent_token else _not_found(False, asked)
    if status == 403:
        return KvtoolError(
            f"the Hub forbids access to {asked.repo_id} (403)",
            f"check the permissions of your token, and whether {asked.page} opens in a browser",
            code="forbidden",
        )
    if status == 407:
        return _proxy("it asks for a user and a password (407)")
    if status == 429:
        return _rate_limited(headers, sent_token)
    if status >= 500:
        return KvtoolError(
            f"{asked.host} has trouble: it answered {status}",
            "try again in a few minutes (status.huggingface.co), or give a local config.json",
            code="server_error",
        )
    return KvtoolError(
        f"{asked.host} answered {status} when asked for {asked.repo_id}",
        f"check whether {asked.page} opens in a browser, and HF_ENDPOINT if you set it",
        code="hub_error",
    )


def _rate_limited(headers: Mapping[str, str], sent_token: bool) -> KvtoolError:
    wait = re.fullmatch(r"\s*(\d{1,6})\s*", headers.get("Retry-After", "")) or re.search(
        r";\s*t\s*=\s*(\d{1,6})", headers.get("ratelimit", "")
    )
    when = f"wait {int(wait[1])} s" if wait else "wait a few minutes"
    more = "" if sent_token else f", or {LOGIN}: the limit is higher with a token"
    return KvtoolError(
        "the Hub refuses for now: too many requests (429)", when + more, code="rate_limited"
    )


def bad_token(why: str) -> KvtoolError:
    """The token is at fault, whatever was asked for. Its text is never shown."""
    return KvtoolError(
        f"the Hugging Face token cannot be used: {why}",
        "correct or unset HF_TOKEN, or run `hf auth login`; tokens: hf.co/settings/tokens",
        code="bad_token",
    )


def bad_endpoint() -> KvtoolError:
    """HF_ENDPOINT holds something else than an address."""
    return KvtoolError(
        "HF_ENDPOINT is not the address of a Hub",
        "unset it, or write it like https://huggingface.co",
        code="bad_endpoint",
    )


def _proxy(why: str) -> KvtoolError:
    return KvtoolError(
        f"the proxy does not let us through to the Hub: {why}",
        "check HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY",
        code="proxy",
    )


def _from_transport(error: BaseException, kinds: set[str], asked: Asked) -> KvtoolError:
    if kinds & {"LocalProtocolError", "UnicodeEncodeError"}:
        return bad_token("it holds characters that no token has")
    if kinds & {"OIDCError", "DeviceCodeError", "LocalTokenNotFoundError"}:
        return bad_token("none could be obtained")
    if "OfflineModeIsEnabled" in kinds:
        return offline(asked)
    if "ProxyError" in kinds:
        return _proxy(_detail(error))
    if isinstance(error, ValueError | ImportError) and "proxy" in str(error).lower():
        return _proxy("its address is not one that can be used")
    if kinds & {"UnsupportedProtocol", "InvalidURL"}:
        return bad_endpoint()
    if kinds & {"TimeoutException", "TimeoutError"}:
        return KvtoolError(
            f"{asked.host} did not answer in time",
            "check the network, or give it longer with HF_HUB_ETAG_TIMEOUT and"
            " HF_HUB_DOWNLOAD_TIMEOUT (seconds)",
            code="timeout",
        )
    if kinds & {"NetworkError", "RemoteProtocolError"}:
        return _no_network(error, asked)
    missing = [name for name in CERTIFICATES if not Path(os.environ.get(name) or "/").exists()]
    if isinstance(error, OSError) and missing:
        return KvtoolError(
            f"{missing[0]} names a file that does not exist",
            "unset it, or name a file of certificates",
            code="tls",
        )
    if isinstance(error, OSError) and error.errno is not None:
        return KvtoolError(
            f"the Hub's local cache cannot be written or read: {error.strerror}",
            "set HF_HOME to a folder that you can write to",
            code="cache",
        )
    return KvtoolError(
        f"{asked.filename} of {asked.repo_id} could not be fetched ({type(error).__name__})",
        "try again, or give a local config.json; KVTOOL_DEBUG=1 shows where it failed",
        code="hub_error",
    )


def _no_network(error: BaseException, asked: Asked) -> KvtoolError:
    detail = _detail(error)
    if "CERTIFICATE" in detail.upper():
        return KvtoolError(
            f"the certificate of {asked.host} cannot be verified",
            "behind a proxy that inspects traffic, set SSL_CERT_FILE to its certificates",
            code="tls",
        )
    return KvtoolError(
        f"{asked.host} cannot be reached: {detail}",
        "check the network, HTTPS_PROXY and HF_ENDPOINT; presets and local files need no network",
        code="no_network",
    )


def _detail(error: BaseException) -> str:
    """The system's own words on one line, without errno, and without what may be a secret."""
    text = re.sub(r"^\[Errno -?\d+\] ", "", " ".join(str(error).split()))
    text = re.sub(r"//[^/\s]*@", "//", re.sub(r"hf_\w+", "hf_…", text))
    return text[:120] or "the connection broke off"
