"""Files that are torn, in parts, or hold what the model does not take: one sentence, or a finding."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import ARCHITECTURES, transformers
from qknorm.auditor.weights import audit_weights
from qknorm.cli import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """`qknorm audit` in this process: exit code, stdout, the lines of stderr that are an error's."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["qknorm", "audit", *map(str, arguments)])
        capfd.readouterr()
        try:
            main()
            code: Any = 0
        except SystemExit as ended:
            code = ended.code
        out, err = capfd.readouterr()
        return int(code or 0), out, "\n".join(x for x in err.splitlines() if x.startswith("error: "))

    return run


def assert_refused(ended: tuple[int, str, str], name: str) -> str:
    """One sentence that names the file, and exit code 2."""
    code, out, err = ended
    assert code == 2, (out, err)
    assert len(err.splitlines()) == 1, err
    assert name in err
    assert not out
    return err


def tensors(layers: int = 2) -> dict[str, torch.Tensor]:
    made = {}
    for layer in range(layers):
        for side in "qk":
            name = f"model.layers.{layer}.self_attn.{side}"
            made[f"{name}_proj.weight"] = torch.randn(16, 8)
            made[f"{name}_norm.weight"] = 0.5 + torch.rand(8)
    return made


def write(path: Path, held: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    save_file(held, path, metadata={"format": "pt"})
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A Qwen3 with unequal gains."""
    architecture = ARCHITECTURES["qwen3"]
    model = architecture.make()
    architecture.randomise_(model, 3)
    folder = tmp_path / "checkpoint"
    model.save_pretrained(folder)
    return folder


def change(file: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    from safetensors.torch import load_file

    held = load_file(file)
    edit(held)
    write(file, held)


# F41: what cannot be read -----------------------------------------------------------------------------


def torn(data: bytes) -> dict[str, bytes]:
    """A file cut short at many places, zeroed in parts, and with a header that does not fit."""
    n = len(data)
    cuts = {f"cut at {at}": data[:at] for at in {0, 1, 7, 8, 9, 30, n // 4, n // 2, n - 9, n - 1}}
    zeros = {"zeroed": bytes(n), "zeroed at the start": bytes(64) + data[64:]}
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    first = next(name for name in header if name != "__metadata__")
    shapes = {}
    for what, shape in {"larger": [999, 8], "smaller": [1, 7], "negative": [-16, 8]}.items():
        other = header | {first: header[first] | {"shape": shape}}
        text = json.dumps(other).encode()
        shapes[what] = struct.pack("<Q", len(text)) + text + data[8 + size :]
    huge = {"huge header": struct.pack("<Q", 1 << 60) + data[8:], "no json": data[:8] + b"{" * size}
    return cuts | zeros | shapes | huge


def test_f41_a_torn_file_of_weights_is_one_sentence(tmp_path: Path, command: Command) -> None:
    file = write(tmp_path / "w.safetensors", tensors())
    whole = file.read_bytes()
    assert command(file)[0] == 0
    for what, data in torn(whole).items():
        file.write_bytes(data)
        assert assert_refused(command(file), "w.safetensors"), what


def test_f41_a_folder_with_a_torn_file_is_one_sentence(checkpoint: Path, command: Command) -> None:
    file = checkpoint / "model.safetensors"
    whole = file.read_bytes()
    for data in (whole[: len(whole) // 2], b""):
        file.write_bytes(data)
        assert_refused(command(checkpoint), "checkpoint")
    file.write_bytes(whole)
    change(file, lambda held: held.update({"model.embed_tokens.weight": torch.zeros(3, 3)}))
    assert_refused(command(checkpoint), "checkpoint")
    file.unlink()
    assert_refused(command(checkpoint), "checkpoint")  # no weights at all
    assert command(checkpoint, "--no-weights")[0] == 0
    for data in (b"", b"\x80\x02not a pickle", whole):
        (checkpoint / "pytorch_model.bin").write_bytes(data)
        assert_refused(command(checkpoint), "checkpoint")
    (checkpoint / "config.json").write_text('{"model_type": ')
    assert_refused(command(checkpoint), "checkpoint")


def test_f41_code_of_a_checkpoint_is_neither_run_nor_asked_for(
    checkpoint: Path, command: Command
) -> None:
    (checkpoint / "own.py").write_text("raise SystemExit('it ran')")
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert "it ran" not in assert_refused(command(checkpoint), "checkpoint")


FACTORIES = """
import sys, torch
def raises(): raise KeyError("no such size")
def leaves(): sys.exit(0)
def prints():
    print("built")
    return torch.nn.TransformerEncoderLayer(16, 2), torch.randn(5, 1, 16)
class Broken(torch.nn.Linear):
    def forward(self, x):
        sys.exit(0)
def model_leaves(): return Broken(2, 2), torch.ones(1, 2)
"""


def test_f41_whatever_a_factory_does_is_one_sentence(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "factories_f41.py").write_text(FACTORIES)
    (tmp_path / "broken_f41.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("factories_f41:raises", "factories_f41:leaves", "factories_f41:model_leaves"):
        assert_refused(command(name), "Broken" if "model" in name else name)
    assert_refused(command("broken_f41:model"), "broken_f41:model")
    code, out, _ = command("factories_f41:prints", "--json")
    assert code == 0
    assert json.loads(out)["passed"]  # what was printed is not in the answer


# F47: expectations by the command ----------------------------------------------------------------------


def test_f47_expectations_by_the_command(checkpoint: Path, tmp_path: Path, command: Command) -> None:
    right = ["--expect", "causal", "--expect", "norm=head", "--expect", "*.0.*:eps=3e-5"]
    code, out, _ = command(checkpoint, *right)
    assert code == 0, out
    assert "not probed" not in out
    code, out, _ = command(checkpoint, *right, "--expect", "model.layers.1.*:sink=logit")
    assert code == 1
    assert "QK024 error  sink is expected to be logit and is none (model.layers.1.self_attn)" in out
    declared = command(checkpoint, "--expect", "order=after_rope", "--suppress", "QK024=known")
    assert declared[0] == 0
    for wrong in ("colour=red", "window=wide", "causal=maybe"):
        assert_refused(command(checkpoint, "--expect", wrong), wrong.partition("=")[0])
    file = write(tmp_path / "w.safetensors", tensors())
    code, out, _ = command(file, "--expect", "causal")
    assert code == 0
    assert "not probed: expected causal=yes: a file of weights computes nothing" in out


# F42: parts of a model ---------------------------------------------------------------------------------


def test_f42_one_part_brings_the_others_or_is_not_audited(tmp_path: Path, command: Command) -> None:
    held = tensors()
    halves = [{n: t for n, t in held.items() if ("_norm" in n) == part} for part in (False, True)]
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for file, half in zip(files, halves, strict=True):
        write(tmp_path / file, half)
    index = tmp_path / "model.safetensors.index.json"
    names = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    index.write_text(json.dumps({"weight_map": names}))
    for path in (tmp_path / files[0], tmp_path / files[1], index):
        report = audit_weights(path)
        assert not report.findings
        assert files[0] in report.exercised[0]
    # Parts may be called otherwise: then the index names them.
    other = {"a.safetensors": files[0], "b.safetensors": files[1]}
    for new, old in other.items():
        (tmp_path / old).rename(tmp_path / new)
    index.write_text(json.dumps({"weight_map": {n: n[-1:] and "a.safetensors" for n in halves[0]}}))
    assert {one.code for one in audit_weights(tmp_path / "a.safetensors").findings} == {"QK001"}
    map_ = dict.fromkeys(halves[0], "a.safetensors") | dict.fromkeys(halves[1], "b.safetensors")
    index.write_text(json.dumps({"weight_map": map_}))
    assert not audit_weights(tmp_path / "b.safetensors").findings
    (tmp_path / "b.safetensors").unlink()
    for path in (index, tmp_path / "a.safetensors"):
        assert "b.safetensors" in assert_refused(command(path), path.name)
    index.unlink()
    (tmp_path / "a.safetensors").rename(tmp_path / files[0])
    assert files[1] in assert_refused(command(tmp_path / files[0]), files[0])
    index.write_text("{")
    assert_refused(command(index), index.name)


def test_f42_a_folder_that_lacks_a_part_is_not_audited(checkpoint: Path, command: Command) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    model.save_pretrained(checkpoint, max_shard_size="20KB")
    parts = sorted(checkpoint.glob("model-*.safetensors"))
    assert len(parts) > 1
    assert command(checkpoint)[0] == 0
    parts[-1].unlink()
    assert_refused(command(checkpoint), "checkpoint")


# F43: what the loader says -----------------------------------------------------------------------------


def test_f43_norms_that_the_architecture_does_not_call(checkpoint: Path, command: Command) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    code, out, _ = command(checkpoint, "--json")
    assert code == 1
    found = [one for one in json.loads(out)["findings"] if one["code"] == "QK009"]
    assert [one["layer"] for one in found] == [f"model.layers.{n}.self_attn" for n in range(2)]
    for side in "qk":
        assert f"model.layers.1.self_attn.{side}_norm.weight" in found[1]["message"]
    declared = command(checkpoint, "--suppress", "QK009=wanted")
    assert declared[0] == 0
    assert "QK009 suppressed: wanted" in declared[1]


def test_f43_weights_of_attention_that_no_file_holds(checkpoint: Path, command: Command) -> None:
    file = checkpoint / "model.safetensors"
    change(file, lambda held: held.pop("model.layers.1.self_attn.k_norm.weight"))
    code, out, _ = command(checkpoint, "--json")
    (one,) = [one for one in json.loads(out)["findings"] if one["severity"] != "info"]
    assert (code, one["code"], one["layer"]) == (1, "QK020", "model.layers.1.self_attn")
    # What is outside of attention changes no formula.
    change(file, lambda held: held.pop("model.layers.1.mlp.up_proj.weight"))
    assert command(checkpoint)[0] == 1
    change(file, lambda held: held.pop("model.layers.1.self_attn.v_proj.weight"))
    assert_refused(command(checkpoint), "model.layers.1.self_attn.v_proj.weight")


# F54: layers that take their keys from another ---------------------------------------------------------


def test_f54_a_file_whose_layers_share_keys(tmp_path: Path) -> None:
    held = tensors()
    del held["model.layers.1.self_attn.k_proj.weight"], held["model.layers.1.self_attn.k_norm.weight"]
    assert not audit_weights(write(tmp_path / "a.safetensors", held)).findings
    # A norm that is missing beside a projection, or beside one for all, is still found.
    held["model.layers.1.self_attn.k_proj.weight"] = torch.randn(16, 8)
    fused = {n: t for n, t in tensors().items() if "_proj" not in n and "1.self_attn.q" not in n}
    fused["model.layers.1.self_attn.qkv_proj.weight"] = torch.randn(48, 8)
    for some in (held, fused):
        (one,) = audit_weights(write(tmp_path / "b.safetensors", some)).findings
        assert (one.code, one.layer) == ("QK016", "model.layers.1")


# GGUF --------------------------------------------------------------------------------------------------


def write_gguf(
    path: Path,
    architecture: str = "qwen3",
    *,
    part: tuple[int, int] | None = None,
    only: Callable[[str], bool] = lambda name: True,
) -> Path:
    """A model of two layers; `part` is its number from 0 and of how many."""
    gguf = pytest.importorskip("gguf", reason="needs qknorm[gguf]")
    writer = gguf.GGUFWriter(path, architecture)
    C, F, D, V = 256, 32, 128, 64  # the width of a head that transformers takes, whatever the file says
    writer.add_context_length(64)
    writer.add_embedding_length(C)
    writer.add_block_count(2)
    writer.add_feed_forward_length(F)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(D)
    writer.add_value_length(D)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(V)
    if part is not None:
        writer.add_uint16("split.no", part[0])
        writer.add_uint16("split.count", part[1])
    torch.manual_seed(0)
    shapes = {"token_embd": (V, C), "output": (V, C), "output_norm": (C,)}
    for n in range(2):
        inside = {
            "attn_q": (2 * D, C),
            "attn_k": (D, C),
            "attn_v": (D, C),
            "attn_output": (C, 2 * D),
            "attn_q_norm": (D,),
            "attn_k_norm": (D,),
            "attn_norm": (C,),
            "ffn_norm": (C,),
            "ffn_gate": (F, C),
            "ffn_up": (F, C),
            "ffn_down": (C, F),
        }
        shapes |= {f"blk.{n}.{name}": shape for name, shape in inside.items()}
    for name, shape in shapes.items():
        x = 0.5 + torch.rand(shape) if len(shape) == 1 else 0.2 * torch.randn(shape)
        if only(name):
            writer.add_tensor(f"{name}.weight", x.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_f41_a_torn_gguf_is_one_sentence(tmp_path: Path, command: Command) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    whole, n = file.read_bytes(), file.stat().st_size
    assert command(file, "--weights-only")[0] == 0
    torn = [whole[:at] for at in (0, 3, 4, 9, 24, 200, n // 8, n // 2, n - 40)]
    torn += [bytes(n), bytes(100) + whole[100:], whole[:8] + b"\xff" * 16 + whole[24:]]
    for data in torn:
        file.write_bytes(data)
        assert_refused(command(file, "--weights-only"), "m.gguf")
        assert_refused(command(file), "m.gguf")


def test_f42_a_part_of_a_gguf_is_read_with_the_others_and_never_run(
    tmp_path: Path, command: Command
) -> None:
    files = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for n, file in enumerate(files):
        write_gguf(file, part=(n, 2), only=lambda name, n=n: ("norm" in name) == bool(n))
    for file in files:
        assert not audit_weights(file).findings
        assert "cannot be run" in assert_refused(command(file), file.name)
    renamed = files[0].rename(tmp_path / "renamed.gguf")
    for options in ([], ["--weights-only"]):
        assert "one of 2 parts" in assert_refused(command(renamed, *options), "renamed.gguf")
        assert files[0].name in assert_refused(command(files[1], *options), files[1].name)


def test_f43_norms_of_a_gguf_whose_architecture_has_none(tmp_path: Path, command: Command) -> None:
    code, out, err = command(write_gguf(tmp_path / "m.gguf", "llama"), "--json")
    assert code == 1, err
    found = [one for one in json.loads(out)["findings"] if one["code"] == "QK009"]
    assert [one["layer"] for one in found] == [f"model.layers.{n}.self_attn" for n in range(2)]
    assert "blk.1.attn_k_norm.weight" in found[1]["message"]
    assert command(write_gguf(tmp_path / "m.gguf"))[0] == 0
    lacking = write_gguf(tmp_path / "m.gguf", only=lambda name: name != "blk.1.attn_q")
    assert_refused(command(lacking), "model.layers.1.self_attn.q_proj.weight")
