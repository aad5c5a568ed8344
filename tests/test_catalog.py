"""The loader of presets/: what it finds, what it refuses, and that the quick way is the true way."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtool import catalog
from kvtool.errors import USAGE, KvtoolError

ROOT = Path(catalog.__file__).with_name("presets")

MODELS = """\
# A comment before the first table.
["tiny-1.5b"]
hub_id = "Acme/Tiny-1.5B"
aliases = ["tiny", "Mirror/Tiny-1.5B"]
source = '''
first line
[not-a-header] because of what follows'''
null_keys = ["sliding_window", "text_config.head_dim"]

["tiny-1.5b".config]
model_type = "llama"
architectures = ["grand"]
rms_norm_eps = 1e-05

["tiny-1.5b".config.text_config]
num_hidden_layers = 4

# A comment that belongs to the next table.
[grand]
hub_id = "acme/grand"
source = "acme/grand config.json"
config = { model_type = "gpt2" }
"""

GPU = """\
[x1]
name = "X1"
vendor = "X"
arch = "One"
nominal_memory = "8 GB"
nominal_gb = 8
bandwidth_gb_s = 100
native_kv_dtypes = ["fp16"]
storage_kv_dtypes = []
source = "x.example"
"""


PREFIXES = """\
[loops]
name = "Loops"
turn_dist = "fixed"
turn_mean = 8
turn_cap = 8
output_dist = "fixed"
output_mean = 8
output_cap = 8
turns = 2
source = "x.example"
"""


def _forget() -> None:
    for cached in (
        catalog._tables, catalog.model_presets, catalog.gpu_presets, catalog.prefix_presets,
        catalog.claim_presets,
    ):  # fmt: skip
        cached.cache_clear()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Puts a file into a presets folder of its own, which the catalog then reads."""
    monkeypatch.setattr(catalog, "_ROOT", tmp_path)

    def to(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text, "utf-8")
        _forget()

    yield to
    _forget()


@pytest.mark.parametrize(
    "name", ["tiny-1.5b", "TINY", "Acme/Tiny-1.5B", "acme/tiny-1.5b", "mirror/tiny-1.5B"]
)
def test_a_model_answers_to_its_name_aliases_and_hub_ids_in_any_case(write, name):
    write("models/a.toml", MODELS)
    preset = catalog.model_preset(name)
    assert preset is not None
    assert preset.name == "tiny-1.5b"
    assert preset.hub_id == "Acme/Tiny-1.5B"
    assert preset.aliases == ("tiny", "Mirror/Tiny-1.5B")


@pytest.mark.parametrize("name", ["", "llama", "acme", "tiny-1.5", "not-a-header", "tiny-1.5bb"])
def test_a_name_that_is_only_part_of_the_text_is_no_preset(write, name):
    write("models/a.toml", MODELS)
    assert catalog.model_preset(name) is None


def test_a_name_quoted_in_another_table_still_finds_its_own(write):
    write("models/a.toml", MODELS)
    preset = catalog.model_preset("grand")
    assert preset is not None
    assert preset.hub_id == "acme/grand"


def test_null_keys_become_none_where_they_belong(write):
    write("models/a.toml", MODELS)
    preset = catalog.model_preset("tiny")
    assert preset is not None
    assert preset.config == {
        "model_type": "llama",
        "architectures": ["grand"],
        "rms_norm_eps": 1e-05,
        "sliding_window": None,
        "text_config": {"num_hidden_layers": 4, "head_dim": None},
    }
    assert (preset,) == catalog.model_presets()[:1]


def test_a_key_cannot_be_null_and_have_a_value(write):
    write("models/a.toml", MODELS.replace('"sliding_window"', '"model_type"'))
    with pytest.raises(KvtoolError, match=r"preset tiny-1\.5b: model_type has a value"):
        catalog.model_presets()


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("hub_id =", "hubid =", "hubid: Unexpected keyword argument"),
        ('aliases = ["tiny", "Mirror/Tiny-1.5B"]', 'aliases = "tiny"', "aliases: "),
        ('source = "acme/grand config.json"', "", "grand: source: Field required"),
    ],
)
def test_a_wrong_key_of_a_model_is_reported_by_name(write, right, wrong, named):
    assert right in MODELS
    write("models/a.toml", MODELS.replace(right, wrong))
    with pytest.raises(KvtoolError, match=named) as caught:
        catalog.model_presets()
    assert "hub_id" in caught.value.hint


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("bandwidth_gb_s", "bandwidth_gbs", "x1: .*bandwidth_gbs: Unexpected keyword argument"),
        ("nominal_gb = 8", 'nominal_gb = "8"', "x1: nominal_gb: "),
        ('["fp16"]', "[16]", r"x1: native_kv_dtypes\.0: "),
    ],
)
def test_a_wrong_key_of_a_gpu_is_reported_by_name(write, right, wrong, named):
    write("gpus/x.toml", GPU)
    assert [gpu.id for gpu in catalog.gpu_presets()] == ["x1"]
    write("gpus/x.toml", GPU.replace(right, wrong))
    with pytest.raises(KvtoolError, match=named):
        catalog.gpu_presets()


def test_a_wrong_key_of_shared_prefixes_is_reported_by_name(write):
    write("prefixes/p.toml", PREFIXES)
    assert [one.concurrency for one in catalog.prefix_presets()] == [64]
    write("prefixes/p.toml", PREFIXES.replace("turns = 2", "turn = 2"))
    with pytest.raises(KvtoolError, match="preset loops: turn: Unexpected keyword argument"):
        catalog.prefix_presets()
    write("prefixes/p.toml", PREFIXES.replace("turns = 2", "turns = 2.5"))
    with pytest.raises(KvtoolError, match="preset loops: turns: "):
        catalog.prefix_presets()


CLAIM = """\
[big]
name = "Ten times"
published = "10x"
status = "source"
runs = { one = "size opt-13b" }
figures = [{ name = "bytes", run = "one", field = "total_bytes" }]
reason = "It is arithmetic"
source = "x.example"
"""


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("status =", "state =", "preset big: .*state: Unexpected keyword argument"),
        ("status =", "state =", "status: Field required"),
        ('"size opt-13b" }', "13 }", r"preset big: runs\.one: "),
        ('[{ name = "bytes", run = "one", field = "total_bytes" }]', '"bytes"', "big: figures: "),
    ],
)
def test_a_wrong_key_of_a_claim_is_reported_by_name(write, right, wrong, named):
    write("claims/c.toml", CLAIM)
    assert [one.runs for one in catalog.claim_presets()] == [{"one": "size opt-13b"}]
    write("claims/c.toml", CLAIM.replace(right, wrong))
    with pytest.raises(KvtoolError, match=named):
        catalog.claim_presets()


def test_two_files_cannot_name_the_same_preset(write):
    write("gpus/x.toml", GPU)
    write("gpus/y.toml", GPU)
    with pytest.raises(KvtoolError, match="preset x1 is there twice"):
        catalog.gpu_preset("x1")


def test_the_text_of_a_preset_is_that_of_the_file_without_its_neighbours(write):
    write("models/a.toml", MODELS)
    kind, text = catalog.preset_text("Tiny")
    assert kind == "models"
    assert text in MODELS
    assert text.startswith('["tiny-1.5b"]\n')
    assert text.endswith("num_hidden_layers = 4\n")


def test_an_unknown_preset_gets_a_suggestion_and_the_way_to_the_list():
    with pytest.raises(KvtoolError) as caught:
        catalog.preset_text("h100-smx")
    assert caught.value.exit_code == USAGE
    assert "Did you mean h100-sxm" in caught.value.hint
    assert "kvtool presets" in caught.value.hint


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/*.toml")), ids=lambda path: path.name)
def test_the_tables_found_by_scanning_are_those_that_toml_sees(path: Path):
    whole = tomllib.loads(path.read_text("utf-8"))
    scanned = catalog._tables(path.parent.name)
    for key, table in whole.items():
        assert tomllib.loads(scanned[key]) == {key: table}


def test_every_name_of_every_model_finds_it_and_none_is_shared():
    owners: dict[str, str] = {}
    for preset in catalog.model_presets():
        for name in {preset.name.lower(), preset.hub_id.lower(), *map(str.lower, preset.aliases)}:
            assert owners.setdefault(name, preset.name) == preset.name
            assert catalog.model_preset(name) == preset
    assert owners


def test_every_config_is_strict_json():
    """TOML has inf and nan, which `--show --json` could not print."""
    for preset in catalog.model_presets():
        assert json.loads(json.dumps(preset.config, allow_nan=False)) == preset.config


def test_a_lookup_leaves_pydantic_out():
    code = (
        "import sys; from kvtool.catalog import gpu_preset, model_preset;"
        "gpu_preset('h100'); model_preset('no/such'); print('pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_class_defaults_are_read_once():
    assert catalog.class_defaults()
    assert catalog.class_defaults() is catalog.class_defaults()
