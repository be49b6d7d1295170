"""Stand-ins for the classes with which TRIDENT, STAMP, slide2vec and LazySlide make and call GigaPath's slide encoder.

They are written for these tests, after the public sources of TRIDENT and STAMP, of slide2vec 7.1.4 and of
lazyslide-models 0.1.0. Only how the model is made and called is here, with the dtypes, shapes and coordinates of a
call.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

WEIGHTS = "hf_hub:prov-gigapath/prov-gigapath"


class Trident(nn.Module):
    """``trident.slide_encoder_models.load.GigaPathSlideEncoder``."""

    def __init__(self, freeze: bool = True, **options: Any) -> None:
        super().__init__()
        self.model, self.precision, self.embedding_dim = self._build(**options)
        if freeze:
            self.model.requires_grad_(False).eval()

    def _build(self, pretrained: bool = True) -> Any:
        raise ModuleNotFoundError("flash_attn")

    def forward(self, batch: dict[str, Any], device: str = "cuda") -> Tensor:
        self.model.tile_size = batch["attributes"]["patch_size_level0"]
        found = self.model(batch["features"].to(device), batch["coords"].to(device), all_layer_embed=True)
        return found[11]


class Stamp:
    """``stamp.encoding.encoder.gigapath.Gigapath``."""

    def __init__(self) -> None:
        from gigapath import slide_encoder

        self.model = slide_encoder.create_model(WEIGHTS, "gigapath_slide_enc12l768d", 1536)

    def encode(self, tiles: Tensor, micrometres: Tensor, tile_micrometres: float) -> Tensor:
        size = micrometres.amax(0) + tile_micrometres
        coords = (micrometres / size * 1000).float()[None].half()
        with torch.inference_mode():
            found = self.model.half()(tiles[None].half(), coords)
        return torch.cat(found, 0).squeeze()


class Slide2Vec:
    """``slide2vec.encoders.models.gigapath.GigaPathSlideEncoder``."""

    def __init__(self) -> None:
        from gigapath.slide_encoder import create_model

        self._model = create_model(WEIGHTS, "gigapath_slide_enc12l768d", 1536).eval()

    def encode_slide(self, tile_features: Tensor, coordinates: Tensor, *, tile_size_lv0: int) -> Tensor:
        cells = coordinates.long() // tile_size_lv0
        return self._model(tile_features[None].float(), 256 * cells[None])[-1].squeeze(0)


class LazySlide:
    """``lazyslide_models.vision.gigapath.GigaPathFlashSlideEncoder``."""

    def __init__(self) -> None:
        from gigapath.slide_encoder import create_model

        self.model = create_model(f"{WEIGHTS}-flash", "gigapath_slide_enc12l384d", 384, local_dir="")

    def encode_slide(self, embeddings: Tensor, coords: Tensor) -> dict[str, Tensor]:
        return {"embeddings": self.model(embeddings, coords)[0].squeeze()}


CLASSES = {
    "trident.slide_encoder_models.load.GigaPathSlideEncoder": Trident,
    "stamp.encoding.encoder.gigapath.Gigapath": Stamp,
    "slide2vec.encoders.models.gigapath.GigaPathSlideEncoder": Slide2Vec,
    "lazyslide_models.vision.gigapath.GigaPathFlashSlideEncoder": LazySlide,
}
"""The stand-ins, by the names of the classes that they stand for."""


def modules_with(members: dict[str, Any]) -> dict[str, ModuleType]:
    """Modules, and their packages, that have these members, by name."""
    modules: dict[str, ModuleType] = {}
    for path, member in members.items():
        while "." in path:
            path, _, name = path.rpartition(".")
            module = modules.setdefault(path, ModuleType(path))
            module.__path__ = []  # type: ignore[attr-defined]
            setattr(module, name, member)
            member = module
    return modules
