"""Lists the kinds of cases, one file each."""

from cases import Kind

from kinds import (
    chat_templates,
    checkpoints,
    commands,
    damaged_files,
    export_commands,
    foreign_drafters,
    foreign_fields,
    grammars,
    json_lines,
    manifests,
    model_folders,
    out_folders,
    profiles,
    prompts,
    recipes,
    sampling_parameters,
    tokenizer_files,
)

KINDS: dict[str, Kind] = {
    module.KIND.name: module.KIND
    for module in (
        manifests,
        damaged_files,
        tokenizer_files,
        chat_templates,
        prompts,
        sampling_parameters,
        grammars,
        json_lines,
        recipes,
        profiles,
        checkpoints,
        model_folders,
        foreign_drafters,
        out_folders,
        commands,
        export_commands,
    )
} | {kind.name: kind for kind in foreign_fields.KINDS}
