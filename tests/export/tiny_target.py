"""Makes targets small enough for tests: random weights, one token a character."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

TEMPLATE = (
    "{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}<s>system\nbe nice</s>\n{% endif %}"
    "<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Returns a tokenizer of one token a character; <s> (0) and </s> (1) are special, 98 in all."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {"<s>": 0, "</s>": 1, "\n": 2, **{chr(i): i - 29 for i in range(32, 127)}}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def save_llama(
    folder: Path, template: str | None = TEMPLATE, family: str = "llama", **options: Any
) -> Path:
    """Writes a Hugging Face folder with a two-layer Llama and a context of 256 tokens.

    `family` is another model_type instead; `options` replace fields of its configuration.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    known = {
        "vocab_size": 98,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    config = transformers.AutoConfig.for_model(family, **known | options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return folder


def teach(folder: Path, words: Sequence[str], num_steps: int = 60) -> Path:
    """Trains the target in `folder` to answer "say WORD" with that word again and again.

    It takes about two seconds. Only these prompts are learned: behind others the target's text
    stays noise with some of the words in it.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = make_tokenizer()
    rows = []
    for word in words:
        for i in range(4):
            question = [{"role": "user", "content": f"say {word}{i}"}]
            ids = tokenizer.apply_chat_template(
                question, add_generation_prompt=True, return_dict=False
            )
            rows.append((ids + tokenizer(word * 40)["input_ids"])[:128])
    token_BT = torch.tensor(rows)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(input_ids=token_BT, labels=token_BT).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder
