"""Writes one tiny folder of each kind that strangers publish, and copies of them with changes."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from importing import write
from published_heads import eagle_state, medusa_state
from test_import import write_format, write_peagle
from test_import_dflash import write_format as write_blocks
from test_import_heads import EAGLE
from test_quantised_forms import FORMS, quantised
from tiny_target import save_llama

N, D, VOCAB = 8, 32, 98
DRAFTERS = (
    *("EAGLE-3", "speculators", "P-EAGLE", "DFlash 2", "DSpark", "Medusa 1", "Medusa 2"),
    *("EAGLE-1", "PARD"),
)
QUANTISED = {
    **{"GPTQ": "gptq", "AWQ": "awq", "packed": "w4a16", "int8": "w8a8", "FP8": "fp8 blocks"},
    **{"MLX": "mlx", "bitsandbytes": "nf4 nested"},
}
TARGETS = ("llama", "experts", "adapter", *QUANTISED)
WEIGHTS = (*("model.safetensors", "adapter_model.safetensors", "medusa_lm_head.safetensors"),)


def write_sources(folder: Path) -> dict[str, Path]:
    """Writes all of DRAFTERS and TARGETS, and returns their folders."""
    warnings.simplefilter("ignore")
    found = {"llama": save_llama(folder / "llama", num_hidden_layers=N)}
    llama = found["llama"]
    found["EAGLE-3"] = write_format(folder, "SpecForge", llama)[0]
    found["speculators"] = write_format(folder, "speculators", llama)[0]
    found["P-EAGLE"] = write_peagle(folder / "peagle", llama)[0]
    six = save_llama(folder / "six", num_hidden_layers=6)  # as many as these drafters read
    found["DFlash 2"] = write_blocks(folder / "dflash2", "z-lab's dflash2", six)[0]
    found["DSpark"] = write_blocks(folder / "dspark", "speculators' dspark", six)[0]
    heads = "medusa_lm_head.safetensors"
    one = {"medusa_num_heads": 2, "medusa_num_layers": 1, "version": "1"}
    found["Medusa 1"] = write(folder / "medusa1", one, medusa_state(2, 1, D, VOCAB), heads)
    two = {"medusa_num_heads": 2, "medusa_num_layers": 2, "version": "2"}
    found["Medusa 2"] = write(folder / "medusa2", two, medusa_state(2, 1, D, None), heads)
    found["heads"] = write(folder / "heads", two, medusa_state(2, 1, 2 * D, None), heads)
    found["six"] = six
    eagle = EAGLE | {"bias": True, "rope_theta": 300.0}
    found["EAGLE-1"] = write(folder / "eagle1", eagle, eagle_state(eagle, True))
    found["PARD"] = save_llama(folder / "pard")
    change(found["PARD"], "config.json", {"pard_token": 5})
    found["experts"] = save_llama(
        folder / "experts", family="qwen3_moe", num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16,
    )  # fmt: skip
    wide = save_llama(folder / "wide", hidden_size=64, intermediate_size=96)
    for name, form in QUANTISED.items():
        found[name] = folder / name
        quantised(wide, found[name], *FORMS[form][:2])
    found["adapter"] = _write_adapter(folder / "adapter", llama)
    return found


def _write_adapter(folder: Path, base: Path) -> Path:
    folder.mkdir()
    stem = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {stem.format(i, "A"): torch.ones(4, D) for i in range(N)}
    tensors |= {stem.format(i, "B"): torch.ones(D, 4) / 100 for i in range(N)}
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4, "lora_alpha": 8}
    config |= {"alpha_pattern": {}, "rank_pattern": {}, "target_modules": ["q_proj"]}
    config |= {"init_lora_weights": True, "use_rslora": False, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def copy(whole: Path, folder: Path) -> Path:
    """Returns a copy of a source; its weights are links, which `change_tensors` replaces."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in whole.iterdir():
        if file.suffix in (".safetensors", ".bin"):
            (folder / file.name).symlink_to(file)
        else:
            shutil.copy(file, folder)
    return folder


def change(folder: Path, name: str, fields: dict[str, Any]) -> None:
    """Sets fields of a JSON file; "a.b" is the field b of a."""
    path = folder / name
    document = json.loads(path.read_text()) if path.is_file() else {}
    for place, value in fields.items():
        *parents, last = place.split(".")
        at = document
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    path.write_text(json.dumps(document))


def change_tensors(folder: Path, changes: dict[str, torch.Tensor | str | None]) -> None:
    """Replaces the first tensors whose names hold these texts, or adds them; None removes them,
    and a text is their new name."""
    path = next(folder / name for name in WEIGHTS if (folder / name).is_file())
    tensors = safetensors.torch.load_file(path)
    for part, value in changes.items():
        name = next((name for name in sorted(tensors) if part in name), part)
        old = tensors.pop(name, torch.ones(1))
        if isinstance(value, str):
            tensors[name.replace(part, value)] = old
        elif value is not None:
            tensors[name] = value
    path.unlink()
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
