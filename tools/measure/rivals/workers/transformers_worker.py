"""Decodes with transformers' generate in float32: plainly, or with prompt lookup."""

import protocol
import torch
import transformers


class NewTokens(transformers.StoppingCriteria):
    """Tells the load of new tokens; stops nothing."""

    def __init__(self, load, one, num_prompt_tokens):
        self.load, self.one, self.known = load, one, num_prompt_tokens

    def __call__(self, input_ids, scores, **kwargs):
        self.load.add(self.one, input_ids[0, self.known :].tolist())
        self.known = input_ids.shape[1]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def open_engine(settings):
    """Opens a Hugging Face folder."""
    torch.set_num_threads(settings["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.float32
    )
    options = {}
    if settings["mode"] == "lookup":
        options["prompt_lookup_num_tokens"] = settings["lookup_tokens"]
        options["max_matching_ngram_size"] = settings["lookup_ngram"]
    # The checkpoint's own sampling parameters must not count.
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=settings["end_ids"], pad_token_id=settings["end_ids"][0]
    )

    def answer(prompts, clients, max_new_tokens):
        load = protocol.Load(prompts)
        while found := load.take():
            one, ids = found
            ids_BT = torch.tensor([ids])
            criteria = transformers.StoppingCriteriaList([NewTokens(load, one, len(ids))])
            with torch.inference_mode():
                model.generate(
                    input_ids=ids_BT,
                    attention_mask=torch.ones_like(ids_BT),
                    do_sample=False,
                    max_new_tokens=max_new_tokens,
                    stopping_criteria=criteria,
                    **options,
                )
        return load.reply()

    return transformers.__version__, answer


if __name__ == "__main__":
    protocol.serve(open_engine)
