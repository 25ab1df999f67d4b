"""Lists the kinds of cases, one file each."""

from importlib import import_module

from cases import Kind

from kinds import foreign_fields

FILES = (
    *("manifests", "damaged_files", "tokenizer_files", "chat_templates", "prompts"),
    *("sampling_parameters", "grammars", "json_lines", "recipes", "profiles", "checkpoints"),
    *("model_folders", "foreign_drafters", "out_folders", "commands", "export_commands"),
)
OWN: list[Kind] = [import_module(f"kinds.{file}").KIND for file in FILES]
KINDS: dict[str, Kind] = {kind.name: kind for kind in (*OWN, *foreign_fields.KINDS)}
