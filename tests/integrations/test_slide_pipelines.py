"""GigaPath and GigaPath-Flash on one device, and the blocks of docs/slide-encoder.md in stand-ins of pipelines."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gigapath_cases as cases
import gigapath_reference
import pytest
import torch
from command_line import ROOT
from native_ranks import assert_near
from slide_pipelines import CLASSES, LazySlide, Slide2Vec, Stamp, modules_with
from torch import Tensor

from ring_backends import dilated_attention, score_mods
from ring_backends.adapters.native import RingDilatedAttention
from ring_backends.cost.machine import peak_memory_bytes, reset_peak_memory
from ring_backends.integrations import gigapath

PAGE = ROOT / "docs" / "slide-encoder.md"
GRID = 24
FLASH, LARGE = "gigapath_slide_enc12l384d", "gigapath_slide_enc12l768d"
needs_page = pytest.mark.skipif(not PAGE.is_file(), reason="this tree has no docs/")


def make_model(module: Any, arch: str, in_chans: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model with random weights and short segments, in eval mode, by ``create_model`` of a module."""
    monkeypatch.setattr(module.LongNetViT, "get_optimal_segment_length", lambda *sizes: "[8, 16, 32, 64, 128]")
    torch.manual_seed(0)
    model = module.create_model("", arch, in_chans, global_pool=True, slide_ngrids=GRID)
    cases.add_noise(model, 0.1)
    return model.eval()


def use_ring(model: Any) -> None:
    gigapath.use_ring(model, RingDilatedAttention(**vars(gigapath.pattern_of(model))))


@pytest.mark.parametrize(
    "module",
    [
        "gigapath_reference",
        pytest.param(
            "gigapath.slide_encoder",
            marks=pytest.mark.skipif(find_spec("gigapath") is None, reason="gigapath is not installed"),
        ),
    ],
)
@pytest.mark.parametrize(
    ("arch", "in_chans"),
    [(FLASH, 384), pytest.param(LARGE, 1536, marks=pytest.mark.matrix(reason="a large model"))],
)
def test_architectures(module: str, arch: str, in_chans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers have the embeddings of the published code, also for slides with another tile size."""
    model = make_model(import_module(module), arch, in_chans, monkeypatch).double()
    assert len(model.encoder.layers) == 12
    generator = torch.Generator().manual_seed(1)
    slides = [(torch.randn(1, n, in_chans, generator=generator).double(), size) for n, size in ((40, 256), (17, 448))]
    coords = [torch.randint(GRID * size, (1, x.shape[1], 2), generator=generator) for x, size in slides]

    def embed() -> list[Tensor]:
        found = []
        for (x, model.tile_size), of_tiles in zip(slides, coords, strict=True):
            found += model(x, of_tiles, all_layer_embed=True)
        return found

    with torch.no_grad():
        with cases.own_code(model):
            expected = embed()
        use_ring(model)
        embeddings = embed()
    tolerance = 1e-11 if module == "gigapath_reference" else 1e-7  # the published class computes GELU in fp32
    assert len(embeddings) == len(expected) == 2 * 13
    for found, right in zip(embeddings, expected, strict=True):
        assert_near(found, right, tolerance)


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)],
    ids=str,
)
def test_precisions(dtype: torch.dtype, autocast: bool) -> None:
    """The error is at most twice that of the published code in the same precision."""
    x, coords = cases.make_slide(61)
    model = cases.make_model().eval()
    with torch.no_grad():
        (wanted,) = model(x, coords)
        model, x = (value.float() if autocast else value.to(dtype) for value in (model, x))

        def error() -> float:
            with torch.autocast("cpu", dtype, enabled=autocast):
                (found,) = model(x, coords)
            return float((found.double() - wanted).norm())

        own = error()
        use_ring(model)
        assert error() <= 2 * own


def test_memory_of_the_bias_by_distance() -> None:
    """Full attention over n tokens takes less than a quarter of the memory of n² elements."""
    n, cpu = 8000, torch.device("cpu")

    def attend(n: int) -> None:
        query, key, value = torch.randn(3, 1, n, 1, 8)
        bias = score_mods.distance(torch.randint(64, (1, n, 2)), score_mods.alibi_slopes(1))
        dilated_attention(query, key, value, [None], [1], score_mod=bias)

    attend(100)
    reset_peak_memory(cpu)
    before = peak_memory_bytes(cpu)
    attend(n)
    assert peak_memory_bytes(cpu) - before < 4 * n * n / 4


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``gigapath`` and the pipelines are stand-ins that make narrow models. The fixture is ``create_model``."""
    monkeypatch.setattr(gigapath_reference, "ARCHITECTURES", {LARGE: (64, 12), FLASH: (32, 12)})
    monkeypatch.setitem(gigapath_reference.DEFAULTS, "slide_ngrids", GRID)
    monkeypatch.setattr(gigapath_reference.LongNetViT, "get_optimal_segment_length", lambda *_: "[8, 16, 32, 64, 128]")

    def create_model(*args: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        model = gigapath_reference.create_model(*args, **options)
        cases.add_noise(model, 0.1)
        return model

    own = {"gigapath.slide_encoder.create_model": create_model}
    for name, module in modules_with({**own, **CLASSES}).items():
        monkeypatch.setitem(sys.modules, name, module)
    return create_model


def run_block(start: str, **names: Any) -> dict[str, Any]:
    """Run the Python block of the page that starts with this line. Return its names."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if block.startswith(f"{start}\n"))
    exec(compile(block, f"{PAGE}: {start}", "exec"), names)
    return names


def a_slide(in_chans: int, tile_size: int, number: int = 40) -> tuple[Tensor, Tensor]:
    """Tiles [number, in_chans] and pixels [number, 2]."""
    generator = torch.Generator().manual_seed(number)
    places = torch.randperm(GRID * GRID, generator=generator)[:number]
    pixels = tile_size * torch.stack([places // GRID, places % GRID], 1)
    return torch.randn(number, in_chans, generator=generator), pixels


@needs_page
def test_three_lines(packages: Callable[..., Any]) -> None:
    model = packages("", FLASH, 384).double().eval()
    tiles, coords = a_slide(384, 256)
    (expected,) = model(tiles[None].double(), coords[None])
    run_block("from ring_backends.adapters.native import RingDilatedAttention", slide_encoder=model)
    (found,) = model(tiles[None].double(), coords[None])
    assert_near(found, expected, 1e-11)
    assert not torch.distributed.is_initialized()


@needs_page
def test_the_program(packages: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    run_block("# embed_slides.py")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{n} tiles of {size} pixels: an embedding of (1, 32)" for n, size in ((500, 256), (300, 512))]


@needs_page
def test_trident(packages: Callable[..., Any]) -> None:
    """As in TRIDENT's ``extract_slide_features``."""
    slide_encoder = run_block("# trident_gigapath.py")["GigaPathWithoutFlashAttention"](pretrained=False)
    model = packages("", LARGE, 1536, global_pool=True).eval()
    for tile_size in (512, 224):
        tiles, coords = a_slide(1536, tile_size)
        batch = {"features": tiles[None], "coords": coords[None], "attributes": {"patch_size_level0": tile_size}}
        with torch.inference_mode():
            found = slide_encoder.to("cpu").eval()(batch, "cpu")
            model.tile_size = tile_size
            assert_near(found, model(tiles[None], coords[None], all_layer_embed=True)[11], 1e-5)


@needs_page
@pytest.mark.parametrize("name", ["slide2vec", "lazyslide"])
def test_slide2vec_and_lazyslide(packages: Callable[..., Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own classes, whose ``create_model`` is replaced, in eval mode."""

    def embed(encoder: Any) -> Tensor:
        with torch.inference_mode():
            if name == "slide2vec":
                return encoder.encode_slide(*a_slide(1536, 512), tile_size_lv0=512)
            tiles, coords = a_slide(384, 256)
            return encoder.encode_slide(tiles[None], coords[None])["embeddings"]

    own = Slide2Vec() if name == "slide2vec" else LazySlide()
    (own._model if name == "slide2vec" else own.model).eval()
    monkeypatch.setitem(sys.modules, "gigapath_on_one_device", None)
    run_block("# gigapath_on_one_device.py")
    monkeypatch.setitem(sys.modules, "gigapath_on_one_device", sys.modules[__name__])
    encoder = run_block(f"# {name}_gigapath.py")["encoder"]
    model = encoder._model if name == "slide2vec" else encoder.model
    assert hasattr(model.encoder.layers[0].self_attn, "ring_attention")
    assert_near(embed(encoder), embed(own), 1e-5)


@needs_page
def test_stamp(packages: Callable[..., Any]) -> None:
    """In fp16, with coordinates from 0 to 1000 in fp16."""
    tiles, pixels = a_slide(1536, 256, 160)
    own = Stamp()
    own.model.eval()
    expected = own.encode(tiles, pixels / 2.0, 128.0)
    encoder = run_block("# stamp_gigapath.py")["encoder"]
    with pytest.warns(UserWarning, match="coords puts the 160 tiles of slide 0 on 16 places"):
        found = encoder.encode(tiles, pixels / 2.0, 128.0)
    assert found.dtype is torch.float16
    assert_near(found.float(), expected.float(), 2e-2)
