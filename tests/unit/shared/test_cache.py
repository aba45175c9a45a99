"""A quantised base on the disk: every change after it was written is found at the next start and reported in words."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.base.cache import DIGESTS, CachedBase, cached_base, existing_base, file_digest, find_model
from shared.config.data import CurriculumConfig
from shared.config.load import config_from_json, config_to_json
from shared.config.model import LoraConfig, ModelConfig, cache_root
from shared.config.training import TeacherConfig
from shared.config.tree import Config
from shared.embedded import EMBEDDED
from shared.errors import DamageError, ModelError, RunDirError
from shared.model.layers.nf4 import WEIGHTS
from shared.run.files import UNFINISHED, beside
from tests.support.local_server import LocalServer


@pytest.fixture
def base(checkpoint: Path, tmp_path: Path) -> Callable[[], CachedBase]:
    """One start: the base from a cache of this test's own."""
    return lambda: cached_base(ModelConfig(path=str(checkpoint), cache_dir=str(tmp_path / "cache")))


def test_a_base_is_present_once_it_was_made(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_hub = tmp_path / "disk" / "models--us--model" / "snapshots" / "main"
    shutil.copytree(checkpoint, in_hub)
    (tmp_path / "hub").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for path, source in ((str(checkpoint), str(checkpoint)), ("us/model", str(in_hub))):
        model = ModelConfig(path=path, cache_dir=str(tmp_path / "cache"))
        assert existing_base(model) is None
        made = cached_base(ModelConfig(path=source, cache_dir=str(tmp_path / "cache")))
        assert existing_base(model) == made.folder
    for nowhere in ("us/other", str(tmp_path / "model.gguf")):
        assert existing_base(ModelConfig(path=nowhere, cache_dir=str(tmp_path / "cache"))) is None


def flip(path: Path, byte: int, bit: int = 0) -> None:
    """One bit of a file; a negative byte counts from the end."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("byte", [8, 200, -1, -3000])
def test_a_flipped_bit_in_the_weights_is_refused_with_the_remedy(base: Callable[[], CachedBase], byte: int) -> None:
    folder = base().folder
    flip(folder / WEIGHTS, byte)
    with pytest.raises(DamageError, match=rf"{folder} is damaged: {WEIGHTS} .* remove that folder"):
        base()


def test_any_file_may_be_the_damaged_one(base: Callable[[], CachedBase]) -> None:
    folder = base().folder
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for spoil in (lambda path=path: flip(path, 1), lambda path=path: path.write_bytes(b""), path.unlink):
            spoil()
            with pytest.raises(DamageError, match="is damaged"):
                base()
            path.write_bytes(whole)
    (folder / "stray.json").write_text("{}")
    with pytest.raises(DamageError, match=r"stray\.json"):
        base()


def test_the_remedy_works_and_gives_the_same_bits(base: Callable[[], CachedBase]) -> None:
    first = base()
    flip(first.folder / WEIGHTS, -1)
    shutil.rmtree(first.folder)
    assert base() == first


def test_a_list_made_to_fit_does_not_hide_that_it_is_another_base(base: Callable[[], CachedBase]) -> None:
    """The digest is that of the bytes in the file, not of a note: a checkpoint and a peer will not accept it."""
    first = base()
    flip(first.folder / WEIGHTS, -1)
    listed = json.loads((first.folder / DIGESTS).read_text()) | {WEIGHTS: file_digest(first.folder / WEIGHTS)}
    (first.folder / DIGESTS).write_text(json.dumps(listed))
    assert base().digest not in (first.digest, "")


def test_a_model_whose_name_has_a_dot_has_a_lock_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "coder-0.5b"
    shutil.copytree(checkpoint, source)
    made = cached_base(ModelConfig(path=str(source), cache_dir=str(tmp_path / "cache"))).folder
    assert {path.name for path in made.parent.iterdir()} == {made.name, f"{made.name}.lock"}


INDEX = "model.safetensors.index.json"


@pytest.fixture
def twice(checkpoint: Path, tmp_path: Path) -> Path:
    """The model in two files with an index, and once more in a file with other names, as some are published."""
    folder = tmp_path / "twice"
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    save_file({"layers.0.attention.wq.weight": torch.ones(64, 64)}, folder / "consolidated.safetensors")
    return folder


def made_of(source: Path, folder: Path) -> CachedBase:
    return cached_base(ModelConfig(path=str(source), cache_dir=str(folder / "cache")))


def test_weights_that_are_published_twice_are_read_once(
    base: Callable[[], CachedBase], checkpoint: Path, twice: Path, tmp_path: Path
) -> None:
    assert made_of(twice, tmp_path).digest == base().digest
    (twice / INDEX).unlink()
    assert made_of(twice, tmp_path).digest == base().digest
    save_file({"layers.0.attention.wq.weight": torch.ones(64, 64)}, twice / "model-00003-of-00002.safetensors")
    shutil.copyfile(checkpoint / WEIGHTS, twice / WEIGHTS)
    assert made_of(twice, tmp_path).digest == base().digest, "the one file counts, as in transformers"


def test_a_model_that_is_not_whole_is_refused(twice: Path, tmp_path: Path) -> None:
    (twice / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors, which its index names"):
        made_of(twice, tmp_path)
    (twice / INDEX).write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json is not an index of weights"):
        made_of(twice, tmp_path)


def test_a_model_cannot_take_other_files_along_by_a_link(checkpoint: Path, tmp_path: Path) -> None:
    source, secret = tmp_path / "model", tmp_path / "secret"
    shutil.copytree(checkpoint, source)
    secret.write_text("token")
    for target in (secret, Path("/proc/self/environ"), Path("/dev/null"), tmp_path, tmp_path / "missing"):
        (source / "usage.txt").symlink_to(target)
        with pytest.raises(ModelError, match=r"usage\.txt is no file of that folder: .* copy .* there, or remove it"):
            made_of(source, tmp_path)
        (source / "usage.txt").unlink()
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    (source / "usage.txt").symlink_to("config.json")
    assert (made_of(source, tmp_path).folder / "usage.txt").is_file()


def test_the_links_of_the_hub_and_of_an_installer_are_followed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source, blobs in (("us/snapshots/main", "us/blobs"), ("installed", "packages")):
        for folder in (source, blobs):
            (tmp_path / folder).mkdir(parents=True)
        for file in checkpoint.iterdir():
            shutil.copyfile(file, tmp_path / blobs / f"{file.name}-1")
            (tmp_path / source / file.name).symlink_to(tmp_path / blobs / f"{file.name}-1")
    monkeypatch.setitem(EMBEDDED, "installed", tmp_path / "installed")
    made = [made_of(tmp_path / "us/snapshots/main", tmp_path), made_of(Path("installed"), tmp_path)]
    assert made[0].digest == made[1].digest


FETCH = """
import sys
from shared.base.cache import find_model
from shared.config.model import ModelConfig
print(*sorted(file.name for file in find_model(ModelConfig(path="us/model")).folder.iterdir()))
"""


def hub_with(folder: Path) -> type[BaseHTTPRequestHandler]:
    """A hub with one model, for one client."""
    commit = "f" * 40

    class Handler(BaseHTTPRequestHandler):
        """Serves facts, the list of files, and files."""

        def do_HEAD(self) -> None:
            self.reply(with_body=False)

        def do_GET(self) -> None:
            self.reply(with_body=True)

        def reply(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            files = sorted(folder.iterdir())
            if "/resolve/" in path:
                data = (folder / path.rpartition("/")[2]).read_bytes()
            elif "/tree/" in path:
                listed = [
                    {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name.encode().hex()}
                    for f in files
                ]
                data = json.dumps(listed).encode()
            else:
                siblings = [{"rfilename": file.name} for file in files]
                data = json.dumps({"id": "us/model", "_id": "0", "sha": commit, "siblings": siblings}).encode()
            self.send_response(200)
            for header in (("ETag", f'"{path.encode().hex()[-40:]}"'), ("X-Repo-Commit", commit)):
                self.send_header(*header)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if with_body:
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@pytest.mark.long
def test_the_second_copy_of_the_weights_is_not_fetched(twice: Path, tmp_path: Path) -> None:
    server = LocalServer(("127.0.0.1", 0), hub_with(twice))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    online = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
    places = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_CACHE": str(tmp_path / "hub")}
    command = [sys.executable, "-c", FETCH]
    done = subprocess.run(command, env=os.environ | online | places, capture_output=True, text=True, timeout=60)
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr
    wanted = {file.name for file in twice.iterdir()} - {"consolidated.safetensors"}
    assert set(done.stdout.split()) == wanted and INDEX in wanted


REFUSED = """
import sys
from learner.durable.find_adapter import fetched
from shared.base.cache import find_model
from shared.config.model import ModelConfig
from shared.errors import ModelError
for name in sys.argv[1:]:
    for ask in (lambda: find_model(ModelConfig(path=f"us/{name}")), lambda: fetched("lora.start_from", f"us/{name}")):
        try:
            ask()
        except ModelError as error:
            print(error)
"""
REPLIES = {
    "unknown": (404, "RepoNotFound", "check the name, and set HF_TOKEN if it is private"),
    "other-version": (404, "RevisionNotFound", "check model.revision"),
    "gated": (403, "GatedRepo", "ask its owner for access"),
    "private": (401, "", "set HF_TOKEN to a token that the hub accepts"),
    "broken": (500, "", "check the name and the network"),
    "cut-off": (0, "", "check the name and the network"),
}
"""Status, error and advice by repository. A status of 0 cuts the connection."""
ONLINE = {name: remedy for name, (_, _, remedy) in REPLIES.items()}
OFFLINE = {"private": "unset HF_HUB_OFFLINE"}


class RefusingHub(BaseHTTPRequestHandler):
    """Has no models."""

    def do_GET(self) -> None:
        (name,) = {*self.path.split("/")} & {*REPLIES}
        status, code, _ = REPLIES[name]
        if status:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()
        self.close_connection = True

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.long
@pytest.mark.parametrize(("offline", "remedies"), [("0", ONLINE), ("1", OFFLINE)])
def test_a_hub_that_refuses_is_one_sentence(offline: str, remedies: dict[str, str], tmp_path: Path) -> None:
    server = LocalServer(("127.0.0.1", 0), RefusingHub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    place = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": offline}
    env = os.environ | place | {"HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    argv = [sys.executable, "-c", REFUSED, *remedies]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2 * len(remedies)
    for (name, remedy), model, adapter in zip(remedies.items(), said[::2], said[1::2], strict=True):
        assert model.startswith(f"model.path = 'us/{name}' is neither") and remedy in model
        assert adapter.startswith(f"lora.start_from = 'us/{name}' is neither") and remedy in adapter


LIMITED = """
import resource, sys
from shared.base.cache import cached_base
from shared.config.tree import ModelConfig
from shared.errors import UserError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    cached_base(ModelConfig(path=sys.argv[1], cache_dir=sys.argv[2]))
except UserError as error:
    print(error)
"""


@pytest.mark.long
def test_a_cache_that_takes_no_more_is_one_sentence_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(checkpoint), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "cannot be used (File too large)" in done.stdout and done.stdout.count("\n") == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_what_a_killed_writer_left_is_removed_by_the_next(base: Callable[[], CachedBase]) -> None:
    folder = base().folder
    shutil.rmtree(folder)
    left = beside(folder, UNFINISHED)
    left.mkdir()
    (left / WEIGHTS).write_bytes(b"half")
    assert base().folder == folder and not left.exists()


def test_a_cache_that_cannot_be_made_is_one_sentence(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", Path("/proc/cache")):
        with pytest.raises(RunDirError, match=r"^.* cannot be .* model\.cache_dir( that is not a file)?\.$"):
            cached_base(ModelConfig(path=str(checkpoint), cache_dir=str(place)))


@pytest.mark.parametrize("cache", ["", "relative"])
def test_only_an_absolute_cache_folder_counts(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/mine")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert cache_root(ModelConfig()) == Path("/home/of/mine/.cache/tandem")


NOBODY = """
import os
from pathlib import Path
from shared.config.model import cache_root
from shared.config.tree import ModelConfig
from shared.errors import UserError
os.setuid(54321)
try:
    print(cache_root(ModelConfig()))
except UserError as error:
    print(error)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become a user that does not exist")
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/tandem"),
        ({}, "User 54321 has no home folder for quantised models; set model.cache_dir, HOME or XDG_CACHE_HOME."),
    ],
)
def test_a_user_without_a_home(variables: dict[str, str], said: str) -> None:
    clean = {name: text for name, text in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    command = [sys.executable, "-c", NOBODY]
    done = subprocess.run(command, env=clean | variables, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{said}\n"


def test_a_tilde_in_a_path_is_the_home_folder(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    model = ModelConfig(path=f"~/{checkpoint.name}", cache_dir=str(tmp_path / "cache"))
    assert find_model(model).folder == checkpoint
    assert ModelConfig(path="~/m.gguf").path == str(checkpoint.parent / "m.gguf")
    assert cache_root(ModelConfig(cache_dir="~/c")) == checkpoint.parent / "c"
    assert (
        LoraConfig(start_from="~/a").start_from == TeacherConfig(adapter="~/a").adapter == str(checkpoint.parent / "a")
    )
    assert CurriculumConfig(cache="~/e.json").cache == str(checkpoint.parent / "e.json")
    assert ModelConfig(path="us/model").path == "us/model"
    # A run keeps the path itself: another user may read it.
    kept = config_to_json(Config(model=model))
    monkeypatch.setenv("HOME", "/nowhere")
    assert config_from_json(kept).model.path == str(checkpoint)
