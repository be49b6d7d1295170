"""``ring-backends convert``: checkpoints of torchscale become checkpoints of ``ring_backends.longnet``."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchscale_reference as ts
from command_line import check_refusal, refused, shown
from native_ranks import assert_near
from torch import Tensor

from ring_backends.adapters.native import NativeRingDilatedAttention
from ring_backends.longnet import LongNetDecoder, LongNetEncoder


def prefixed(prefix: str, **options: Any) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in ts.make_state(**options).items()}


@pytest.fixture
def slide_encoder(tmp_path: Path) -> Path:
    """A checkpoint like GigaPath's: an encoder and other modules."""
    zeros = torch.zeros(ts.EMBED_DIM)
    other_modules = {"cls_token": zeros[None, None], "patch_embed.proj.weight": zeros[:, None].repeat(1, 7)}
    other_modules |= dict.fromkeys(("patch_embed.proj.bias", "norm.weight", "norm.bias"), zeros)
    path = tmp_path / "slide_encoder.pth"
    torch.save({"model": {**other_modules, **prefixed("encoder.")}, "epoch": 3}, path)
    return path


def branch_options(branches: Any = ts.BRANCHES) -> str:
    lengths, rates = (",".join(map(str, numbers)) for numbers in branches)
    return f"--segment-lengths {lengths} --dilation-rates {rates}"


def test_convert_and_load_a_slide_encoder(slide_encoder: Path, tmp_path: Path) -> None:
    target = tmp_path / "encoder.pt"
    printed = shown(f"convert --heads 4 {branch_options()}", slide_encoder, target)
    for text in ("LongNetEncoder", "'encoder.'", "2, 24, 4, 40", "(8, 1), (16, 2), (64, 4)", "float64"):
        assert text in printed, printed
    left = printed.partition("Left out")[2]
    for name, entries in (("cls_token", 1), ("patch_embed", 2), ("norm", 2), ("epoch", 1)):
        assert any(name in line and str(entries) in line for line in left.splitlines()), left
    model = LongNetEncoder.from_checkpoint(target, ts.attention())
    assert_near(model(ts.inputs("encoder", 37)).detach(), ts.reference("encoder", 4, 37))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["encoder.pt", "slide_encoder.pth"]
    with pytest.raises(ValueError, match="holds a LongNet encoder, and this is LongNetDecoder"):
        LongNetDecoder.from_checkpoint(target, ts.attention())
    with pytest.raises(ValueError, match="attention has DilatedPattern"):
        LongNetEncoder.from_checkpoint(target, ts.attention(branches=((8,), (1,))))


def test_a_segment_of_the_whole_sequence(slide_encoder: Path, tmp_path: Path) -> None:
    target, branches = tmp_path / "to.pt", ((8, None), (1, 4))
    printed = shown("convert --heads 4 --segment-lengths 8,none --dilation-rates 1,4", slide_encoder, target)
    assert "(8, 1), (whole sequence, 4)" in printed
    x = ts.inputs("encoder", 37)
    got = LongNetEncoder.from_checkpoint(target, ts.attention(branches=branches))(x)
    assert_near(got.detach(), ts.reference_model(ts.make_state(), x, 4, ((8, 37), (1, 4)), False)[-1])
    with pytest.raises(ValueError, match=r"attention has .*window_lengths=\(8, None\)\): .* was converted for"):
        LongNetEncoder.from_checkpoint(target, NativeRingDilatedAttention(*branches, window_lengths=[8, None]))


def test_convert_a_decoder_and_a_converted_file(tmp_path: Path) -> None:
    source, target, again = (tmp_path / name for name in ("lm.pt", "decoder.pt", "again.pt"))
    torch.save(prefixed("module.decoder.", tokens=True), source)
    printed = shown("convert --heads 4", source, target)
    assert "19, 130, 19" in printed
    assert "not given" in printed
    assert "Left out" not in printed
    model = LongNetDecoder.from_checkpoint(target, ts.attention())
    assert_near(model(ts.inputs("decoder", 37)).detach(), ts.reference("decoder", 4, 37))
    options = "--kind decoder --scale-embedding --activation relu --layer-norm-eps 0.1"
    shown(f"convert --heads 3 {options}", source, again)
    model = LongNetDecoder.from_checkpoint(again, ts.attention(), dtype=torch.float32)
    assert (model.layers[0].self_attn.num_heads, model.layer_norm.eps, model.scale) == (3, 0.1, math.sqrt(ts.EMBED_DIM))
    assert model.layers[0].ffn.activation == "relu"
    assert next(model.parameters()).dtype == torch.float32
    # `convert` accepts its own files only with the same options, because the tensors do not show the number of heads.
    shown("convert --heads 4", target, tmp_path / "the same.pt")
    for options, names in (
        ("--heads 3", "heads: num_heads"),
        ("--heads 4 --activation relu", "activation: activation"),
    ):
        message = f"--{names} = .*was written by `convert` with"
        check_refusal(message, f"convert {options}", target, tmp_path / "another.pt")


def test_convert_writes_only_converted_tensors(tmp_path: Path) -> None:
    source, target = tmp_path / "views.pt", tmp_path / "encoder.pt"
    parts = prefixed("encoder.")
    unused = torch.zeros(100_000, dtype=torch.float64)
    flat = torch.cat([value.flatten() for value in (*parts.values(), unused)])
    pieces = flat.split([value.numel() for value in (*parts.values(), unused)])
    views = zip(parts.items(), pieces, strict=False)
    torch.save({name: piece.view(value.shape) for (name, value), piece in views}, source)
    shown("convert --heads 4", source, target)
    assert target.stat().st_size < source.stat().st_size - 700_000


def test_convert_replaces_a_file_only_with_force(slide_encoder: Path, tmp_path: Path) -> None:
    target = tmp_path / "there.pt"
    target.write_text("precious")
    message = "--target: target = .*exists already; give another file, or --force"
    check_refusal(message, "convert --heads 4", slide_encoder, target)
    assert target.read_text() == "precious"
    shown("convert --heads 4 --force", slide_encoder, target)
    LongNetEncoder.from_checkpoint(target, ts.attention())


class Custom:
    """A class that ``weights_only`` loading refuses."""


BOTH = {**prefixed("encoder."), **prefixed("decoder.")}
MISPLACED = ((8, 10), (1, 4))
PADS_SEGMENTS = "--segment-lengths: .*pads every segment.*with --seq-len"


@pytest.mark.parametrize(
    ("saved", "options", "text"),
    [
        ({"model": {"a": torch.zeros(1)}}, "", "source has no names such as layers.0.self_attn.q_proj.weight"),
        ({"epoch": 3}, "", "holds no state_dict, neither at the top level nor under model, state_dict"),
        ([torch.zeros(1)], "", "holds no state_dict"),
        ({"model": Custom()}, "", "not a whole file of tensors and plain values.*torch.save\\(model.state_dict"),
        (b"PK\x03\x04 cut off", "", "not a whole file of tensors"),
        (b"", "", "not a whole file of tensors"),
        (BOTH, "", "--prefix: there are several LongNets, 'decoder.', 'enc"),
        (prefixed("encoder."), "--prefix decoder", "--prefix: prefix = 'decoder.': no layer .*: 'encoder.'"),
        (ts.make_state(tokens=True), "", "--kind: the names do not show"),
        (ts.make_state(), "--kind both", "--kind: kind = 'both'"),
        (ts.make_state(), "--activation swish", "--activation: activation = 'swish'"),
        (ts.make_state(), "--segment-lengths 8,16", "--dilation-rates: dilation_rates is missing"),
        (ts.make_state(), branch_options(MISPLACED), PADS_SEGMENTS),
        (ts.make_state(), f"{branch_options(MISPLACED)} --seq-len 11", "10 and dilation rate 4 on 11"),
    ],
)
def test_convert_refuses_unusable_files(saved: Any, options: str, text: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source.pt", tmp_path / "target.pt"
    if isinstance(saved, bytes):
        source.write_bytes(saved)
    else:
        torch.save(saved, source)
    error = refused(f"convert --heads 4 {options}", source, target)
    assert error.startswith("ring-backends convert: error: ")
    assert re.search(text, error), error
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]


def test_convert_refuses_paths(slide_encoder: Path, tmp_path: Path) -> None:
    convert, none = "convert --heads 4 --force", tmp_path / "none"
    check_refusal("--source: source = .*: not a file", convert, none, tmp_path / "to.pt")
    check_refusal("--target: target = .*none is not a directory", convert, slide_encoder, none / "to.pt")
    check_refusal("--target: target = .*: is a directory", convert, slide_encoder, tmp_path)
    check_refusal(".*SOURCE itself", convert, slide_encoder, slide_encoder)


def test_a_pattern_that_misplaces_is_accepted_for_shorter_sequences(slide_encoder: Path, tmp_path: Path) -> None:
    shown(f"convert --heads 4 {branch_options(MISPLACED)} --seq-len 10", slide_encoder, tmp_path / "to.pt")
    x = ts.inputs("encoder", 10)
    got = LongNetEncoder.from_checkpoint(tmp_path / "to.pt", ts.attention(branches=MISPLACED))(x)
    assert_near(got.detach(), ts.reference_model(ts.make_state(), x, 4, MISPLACED, False)[-1])


def test_a_file_that_convert_did_not_write(slide_encoder: Path) -> None:
    with pytest.raises(ValueError, match="not a file of `ring-backends convert`"):
        LongNetEncoder.from_checkpoint(slide_encoder, ts.attention())
    with pytest.raises(FileNotFoundError):
        LongNetEncoder.from_checkpoint("no such file", ts.attention())
