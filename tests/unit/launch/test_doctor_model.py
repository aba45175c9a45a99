"""What doctor sees of the model, the hub and the tasks, and how much memory it expects to need."""

import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled

from launch.doctor import run_checks
from launch.doctor.finding import Missing
from launch.doctor.model import Model, ask_hub, look_at_hub, look_at_model
from launch.plan.cost import memory_beside_card, work_of
from launch.plan.memory import HEAD_COLUMNS, PRODUCT_BYTES, HostMemory, host_memory
from launch.plan.shape import ModelShape, shape_of
from shared.base.cache import cached_base, dense_base
from shared.config.model import ModelConfig
from shared.config.tree import Config
from shared.embedded import EMBEDDED_DIR
from shared.process.determinism import COMPILED_PRODUCTS
from tests.support.local_server import LocalServer
from tests.support.machines import GIB, QWEN_15B, SMALL, config, sound, write_model

INFO = {"id": "owner/name", "_id": "0", "sha": "f" * 40, "siblings": [], "gated": False, "private": False}
WEIGHTS = [
    {"rfilename": "model.safetensors", "size": 5 * GIB},
    {"rfilename": "consolidated.safetensors", "size": 5 * GIB},
    {"rfilename": "README.md", "size": 7},
]


@dataclass
class FakeHub:
    """A hub with one model, on a port of this machine."""

    url: str = ""
    """Where."""
    responses: dict[str, tuple[int, Mapping[str, object], str]] = field(default_factory=dict)
    """End of the path -> status, body, error code."""

    def handler(self) -> type[BaseHTTPRequestHandler]:
        """Of its requests."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            """Serves GET."""

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                found = [response for end, response in hub.responses.items() if path.endswith(end)]
                status, body, code = found[0] if found else (404, {"error": "no"}, "RepoNotFound")
                data = json.dumps(body).encode()
                self.send_response(status)
                if code:
                    self.send_header("X-Error-Code", code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Up, and asked although tests are offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    fake = FakeHub()
    server = LocalServer(("127.0.0.1", 0), fake.handler())
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield fake
    server.shutdown()
    server.server_close()
    thread.join()


MODEL = ModelConfig(path="owner/name")


# --- the hub


def test_an_open_model_and_its_size(hub: FakeHub) -> None:
    hub.responses["/revision/main"] = (200, INFO | {"siblings": WEIGHTS}, "")
    seen = look_at_hub(MODEL, hub.url)
    assert (seen.found, seen.gated, seen.admitted, seen.num_bytes) == (True, False, True, 5 * GIB)


def test_a_model_that_is_not_there(hub: FakeHub) -> None:
    assert not look_at_hub(MODEL, hub.url).found
    assert not look_at_hub(ModelConfig(path="no/hub/id"), hub.url).found


def test_a_revision_that_is_not_there(hub: FakeHub) -> None:
    hub.responses["/revision/main"] = (404, {"error": "no"}, "RevisionNotFound")
    assert not look_at_hub(MODEL, hub.url).found


def test_a_gated_model_without_access(hub: FakeHub) -> None:
    hub.responses["/revision/main"] = (200, INFO | {"gated": "manual"}, "")
    hub.responses["/auth-check"] = (403, {"error": "ask first"}, "GatedRepo")
    seen = look_at_hub(MODEL, hub.url)
    assert (seen.found, seen.gated, seen.admitted) == (True, True, False)
    hub.responses["/auth-check"] = (200, {}, "")
    assert look_at_hub(MODEL, hub.url).admitted


def test_a_gated_model_that_hides_itself(hub: FakeHub) -> None:
    hub.responses["/revision/main"] = (403, {"error": "ask first"}, "GatedRepo")
    seen = look_at_hub(MODEL, hub.url)
    assert (seen.found, seen.gated, seen.admitted) == (True, True, False)


def test_the_hub_is_not_asked_about_a_local_model(tmp_path: Path) -> None:
    assert ask_hub(Config().model) == Missing("not asked: model.path is not a hub id")
    assert ask_hub(config(model={"path": str(tmp_path)}).model) == Missing("not asked: model.path is not a hub id")


def test_a_fetched_model_is_found_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    fetched = config(model={"path": "owner/name"})
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / ("f" * 40)
    (repository / "refs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (repository / "refs" / "main").write_text("f" * 40)
    with pytest.raises(OfflineModeIsEnabled):
        ask_hub(fetched.model)
    write_model(snapshot, {}, {})
    assert look_at(fetched).folder == snapshot
    assert ask_hub(fetched.model) == Missing("not asked: the model is on this machine")
    (snapshot / "model.safetensors").unlink()
    assert look_at(fetched).folder is None, "a fetch that was broken off"


# --- what is on this machine


def look_at(config: Config) -> Model:
    return look_at_model(config.model, config.lora.targets, config.tasks, config.verifier.kind)


def test_the_embedded_model_is_here_and_measured() -> None:
    model = look_at(Config())
    assert (model.kind, model.folder, model.trouble) == ("embedded", EMBEDDED_DIR, "")
    assert isinstance(model.shape, ModelShape)
    assert (model.shape.layers, model.shape.hidden, model.shape.key_value, model.shape.vocabulary) == (4, 128, 64, 512)
    assert model.shape.file_bytes == sum(file.stat().st_size for file in EMBEDDED_DIR.glob("*.safetensors"))
    layer = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 384
    assert model.shape.linear == 4 * layer
    assert model.shape.rest >= 512 * 128
    assert model.shape.adapter == 4 * (2 * 128 + 2 * (128 + 64) + 2 * 128 + 3 * (128 + 384))


def test_a_folder_that_is_a_model_and_one_that_is_none(tmp_path: Path) -> None:
    none = look_at(config(model={"path": str(tmp_path)}))
    assert (none.kind, none.folder) == ("folder", None)
    write_model(tmp_path, {}, {})
    here = look_at(config(model={"path": str(tmp_path)}))
    assert (here.kind, here.folder) == ("folder", tmp_path)
    assert run_checks.present(replace(sound(), model=none)).level == "error"


def test_a_hub_id_that_was_never_fetched_and_one_that_cannot_be() -> None:
    for path in ("owner/never-fetched", "no/hub/id", "a b"):
        model = look_at(config(model={"path": path}))
        assert (model.kind, model.folder) == ("hub", None)
        assert isinstance(model.shape, Missing)


def test_a_model_of_an_unknown_kind_has_no_size(tmp_path: Path) -> None:
    write_model(tmp_path, {"auto_map": {"AutoModel": "x.Y"}}, {"w": [2, 3]})
    model = look_at(config(model={"path": str(tmp_path)}))
    assert isinstance(model.shape, Missing)
    assert "num_attention_heads" in model.shape.reason


def test_the_size_of_a_model_with_a_text_part_and_a_head_size_of_its_own(tmp_path: Path) -> None:
    text = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "vocab_size": 10,
    }
    tensors = {
        "a.layers.0.q_proj.weight": [4, 5],
        "a.layers.0.x.weight": [2, 5],
        "a.layers.0.norm.weight": [4],
        "embed": [10, 64],
    }
    size = write_model(tmp_path, {"text_config": text}, tensors)
    assert shape_of(tmp_path, ["q_proj"]) == ModelShape(
        linear=30,
        rest=644,
        adapter=9,
        file_bytes=size,
        layers=3,
        hidden=64,
        key_value=64,
        vocabulary=10,
        heads=8,
        outputs=6,
        own_layers=False,
    )


def test_weights_that_are_published_twice_count_once(tmp_path: Path) -> None:
    facts = {"num_attention_heads": 8, "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 10}
    write_model(tmp_path, facts, {"a.layers.0.q_proj.weight": [2, 6]})
    once = shape_of(tmp_path, ["q_proj"])
    shutil.copyfile(tmp_path / "model.safetensors", tmp_path / "consolidated.safetensors")
    assert shape_of(tmp_path, ["q_proj"]) == once
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1-of-1.safetensors")
    assert shape_of(tmp_path, ["q_proj"]) == once
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.layers.0.q_proj.weight": "model-1-of-1.safetensors"}}))
    assert shape_of(tmp_path, ["q_proj"]) == once and look_at(config(model={"path": str(tmp_path)})).folder
    (tmp_path / "model-1-of-1.safetensors").unlink()
    assert look_at(config(model={"path": str(tmp_path)})).folder is None


def test_data_that_a_run_would_refuse_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here.jsonl").write_text('{"question": "1?", "answer": "1"}')
    here = {"source": "~/here.jsonl"}
    assert look_at(config(tasks=here | {"test": "gone.JSONL"})).tasks_trouble.startswith("tasks.test names the file")
    assert "gone.csv" in look_at(config(tasks=here | {"held_out": str(tmp_path / "gone.csv")})).tasks_trouble
    assert "no column 'ask'; it has question, answer" in look_at(config(tasks=here | {"question": "ask"})).tasks_trouble
    for tasks in (here, {"source": "openai/gsm8k", "held_out": "test"}):
        assert look_at(config(tasks=tasks)).tasks_trouble == ""


def test_a_model_that_a_run_would_refuse_is_named(tmp_path: Path) -> None:
    lacks = look_at(config(lora={"targets": ["q_projj"]}))
    assert lacks.trouble.startswith("lora.targets names 'q_projj', which this model does not have; choose from down_")
    nowhere = look_at(config(model={"path": str(tmp_path / "none")}))
    assert nowhere.folder is None and nowhere.trouble.endswith("and no id of the hub; check the path.")
    for targets in (["q_proj"], ["down_proj", "o_proj"]):
        assert look_at(config(lora={"targets": targets})).trouble == ""
    assert look_at(config(model={"path": "owner/name"}, lora={"targets": ["q_projj"]})).trouble == ""


def test_caches_are_where_the_configuration_says(tmp_path: Path) -> None:
    model = look_at(config(model={"cache_dir": str(tmp_path / "deep" / "cache")}))
    assert (model.base_cache.path, model.base_cache.existing) == (tmp_path / "deep" / "cache", tmp_path)


@pytest.mark.parametrize(
    ("dtype", "keys", "needed"),
    [
        *(("bf16", {}, "4.8 GiB"), ("fp32", {}, "8.1 GiB")),
        ("bf16", {"dequantize": "each_call"}, "1.5 GiB"),
        # Its files are in bf16: as they are, or once more in fp32.
        ("bf16", {"quantization": "none"}, "3.3 GiB"),
        ("fp32", {"quantization": "none"}, "9.9 GiB"),
    ],
)
def test_the_cache_needs_room_for_the_codes_and_for_the_values(dtype: str, keys: dict[str, str], needed: str) -> None:
    model = sound().model
    assert isinstance(model, Model)
    planned = config(model=keys, compute={"device": "cpu", "dtype": dtype})
    machine = replace(sound(), config=planned, model=replace(model, shape=QWEN_15B))
    assert f"about {needed} are needed" in run_checks.base_cache(machine).found


def test_what_the_cache_has_needs_no_room(tmp_path: Path) -> None:
    model, root = sound().model, tmp_path / "cache"
    assert isinstance(model, Model)
    planned = config(model={"cache_dir": str(root)}, compute={"device": "cpu", "dtype": "bf16"})

    def needed() -> str:
        found = replace(model, shape=QWEN_15B, cached=look_at(planned).cached)
        said = run_checks.base_cache(replace(sound(), config=planned, model=found)).found
        return said.rpartition(", about ")[2].removesuffix(" are needed")

    base = f"{EMBEDDED_DIR.name}-nf4-{'0a' * 8}"
    for name, left in ((f"{base}-fp32-{'1b' * 8}", "4.8 GiB"), (base, "3.3 GiB"), (f"{base}-bf16-{'1b' * 8}", "0 MiB")):
        (root / name).mkdir(parents=True)
        assert needed() == left


def test_the_parts_in_the_cache_are_those_that_the_cache_makes(tmp_path: Path) -> None:
    model = ModelConfig(cache_dir=str(tmp_path))
    dense_base(cached_base(model), torch.float32)
    assert look_at(config(model={"cache_dir": str(tmp_path)})).cached == {"nf4", "fp32"}
    assert look_at(config(model={"cache_dir": str(tmp_path), "quantization": "none"})).cached == set()


# --- how much memory


def host_need(config: Config, shape: ModelShape) -> HostMemory:
    return host_memory(shape, work_of(config, cores=2))


def test_a_cpu_has_the_base_once_and_the_actors_sums_if_they_are_wanted() -> None:
    needed = host_need(config(actor={"fold": "always"}), QWEN_15B).lasting
    values, adapter = QWEN_15B.linear + QWEN_15B.rest, "adapter of token steps"
    half, usual = host_need(config(compute={"dtype": "bf16"}), QWEN_15B), host_need(Config(), QWEN_15B)
    compiled = 2 * int(COMPILED_PRODUCTS * PRODUCT_BYTES)
    in_bf16 = 2 * values + compiled + half.actor[adapter]
    # The actor's own, its messages and the learner's: once, twice and twice.
    halved = 5 * 2 * 16 * QWEN_15B.adapter
    assert needed - half.lasting == 4 * (values + QWEN_15B.linear) + halved - in_bf16
    without_sums = usual.lasting - usual.actor[adapter]
    assert needed - without_sums == 4 * QWEN_15B.linear, "by default a large model has none"
    assert host_need(config(model={"dequantize": "each_call"}), QWEN_15B).lasting < needed / 2
    assert memory_beside_card(QWEN_15B, 16, "ddp").started < needed / 2


def test_an_adapter_that_is_stepped_beside_the_card_counts_four_times() -> None:
    whole, stepped = (memory_beside_card(QWEN_15B, 16, parallel) for parallel in ("ddp", "zero2"))
    assert stepped.total - whole.total == stepped.started - whole.started == 4 * 4 * 16 * QWEN_15B.adapter


def test_each_key_that_is_named_as_a_remedy_helps() -> None:
    base = host_need(Config(), SMALL).total
    for batch in ({"token_budget": 1024}, {"recompute": "always"}):
        assert host_need(config(batch=batch), SMALL).total < base


def test_the_heads_tiles_do_not_grow_with_the_vocabulary() -> None:
    few, many = config(batch={"head_rows": 512}), config(batch={"head_rows": 1024})
    assert host_need(many, QWEN_15B).total - host_need(few, QWEN_15B).total == 3 * 512 * HEAD_COLUMNS * 4
