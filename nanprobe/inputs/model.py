"""Building the model that a config names: by calling a factory, or from a transformers folder or config.

The seed is set right before the factory runs, after everything was imported, so that an import that draws random
numbers does not shift the weights. Weights of a checkpoint are loaded elsewhere.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from nanprobe.config import ModelSpec, TransformersSpec
from nanprobe.errors import NanprobeError, UsageError
from nanprobe.inputs.factories import call_factory, import_folder, one_line, raised_in_user_code, resolve
from nanprobe.inputs.rng import seed_all
from nanprobe.nearest import suggestion
from nanprobe.out_of_memory import is_out_of_memory

__all__ = ["build_model", "check_values", "unfinished_class"]

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json", "pytorch_model*.bin.index.json")
"""What a folder that ``save_pretrained`` wrote keeps its weights in."""


def build_model(spec: ModelSpec, folder: Path, seed: int, *, with_weights: bool = True) -> nn.Module:
    """Return the model of a config; ``folder`` is the config's, first on ``sys.path`` while the factory runs.

    ``with_weights`` says whether a transformers folder's own weights are loaded (in FP32); without it, or where the
    folder has none, the weights are random. UsageError when the model is not found, raises, or is no module.
    """
    with import_folder(folder):
        if spec.transformers is not None:
            return _from_transformers(spec.transformers, seed, with_weights)
        assert spec.factory is not None
        target = resolve(spec.factory, folder, "model.factory")
        if isinstance(target, nn.Module):
            raise UsageError(
                f"`model.factory`: {spec.factory} is a module already; name a function or class that returns one"
            )
        seed_all(seed)
        model = call_factory(target, spec.kwargs, "model.factory", spec.factory)
    if not isinstance(model, nn.Module):
        raise UsageError(f"`model.factory`: {spec.factory} returned {_kind(model)}, expected a torch.nn.Module")
    unfinished = unfinished_class(model)
    if unfinished is not None:
        raise UsageError(
            f"`model.factory`: {spec.factory} returned a model whose class {unfinished} does not call "
            "super().__init__() in its __init__"
        )
    return model


def unfinished_class(model: nn.Module) -> str | None:
    """Return the class of a module in the model that was never set up by ``nn.Module``, None when all were."""
    waiting, seen = [model], {id(model)}
    while waiting:
        module = waiting.pop()
        children = vars(module).get("_modules")
        if children is None:
            # TorchScript keeps its modules elsewhere; whatever answers is set up.
            if isinstance(module, torch.jit.ScriptModule):
                continue
            return type(module).__name__
        for child in children.values():
            if isinstance(child, nn.Module) and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return None


def check_values(model: nn.Module) -> None:
    """Refuse a model with parameters or buffers on the meta device, without values; UsageError names the first."""
    for what, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta:
                raise UsageError(
                    f"model: {what} `{name}` is on the meta device and holds no values; give it some first, by "
                    "`to_empty` and loading weights, or by building the model on a real device"
                )


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _from_transformers(spec: TransformersSpec, seed: int, with_weights: bool) -> nn.Module:
    key = "model.transformers"
    if not os.path.exists(spec.path):
        raise UsageError(f"`{key}.path`: {spec.path}: no such folder or file")
    if spec.path.is_dir() and not (spec.path / "config.json").is_file():
        raise UsageError(f"`{key}.path`: {spec.path}: there is no config.json in this folder")
    library = _library()
    model_class = _class(library, spec.class_)
    model: Any
    try:
        seed_all(seed)
        if with_weights and _has_weights(spec.path):
            model = model_class.from_pretrained(
                str(spec.path), local_files_only=True, **_dtype_argument(library), **spec.kwargs
            )
        else:
            config, unused = library.AutoConfig.from_pretrained(
                str(spec.path), local_files_only=True, return_unused_kwargs=True, **spec.kwargs
            )
            build = getattr(model_class, "from_config", None) or model_class._from_config
            model = build(config, **_dtype_argument(library), **unused)
    except Exception as error:
        if isinstance(error, NanprobeError) or is_out_of_memory(error):
            raise
        raise UsageError(f"`{key}`: {spec.class_} raised {one_line(error)}{raised_in_user_code(error)}") from error
    if isinstance(model, nn.Module):
        return model
    raise UsageError(f"`{key}.class`: {spec.class_} returned {_kind(model)}, expected a torch.nn.Module")


def _library() -> ModuleType:
    """Return the transformers library, which is needed only by configs that name it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            f"`model.transformers`: the package transformers cannot be imported: {one_line(error)}"
        ) from None


def _class(library: ModuleType, name: str) -> Any:
    try:
        found = getattr(library, name)
    except (AttributeError, ImportError, RuntimeError):
        legal = [candidate for candidate in dir(library) if candidate[:1].isupper()]
        raise UsageError(
            f"`model.transformers.class`: transformers {library.__version__} has no `{name}`; {suggestion(name, legal)}"
        ) from None
    builds = hasattr(found, "from_config") or hasattr(found, "_from_config")
    if not (isinstance(found, type) and builds and hasattr(found, "from_pretrained")):
        raise UsageError(f"`model.transformers.class`: `{name}` builds no model; name a class as AutoModelForCausalLM")
    return found


def _has_weights(path: Path) -> bool:
    return path.is_dir() and any(next(path.glob(pattern), None) is not None for pattern in _WEIGHTS)


def _dtype_argument(library: ModuleType) -> dict[str, torch.dtype]:
    """Return the argument that makes a model FP32 whatever its config says; it was renamed in transformers 4.56."""
    major, minor = (int(part) for part in library.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (4, 56) else "torch_dtype": torch.float32}
