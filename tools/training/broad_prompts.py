"""Writes prompts as broad as use, for `spec-export distill --prompts`.

    python -m tools.training.broad_prompts --seeds FOLDER --out prompts.jsonl --answers FILE.jsonl

Requests of 18 kinds are filled with passages, questions and problems from the seeds, from the help
texts that ship with Python, and from answers that the target wrote itself. The wording and each
origin's licence are in broad_prompts.toml. Every part may be missing.

- `--seeds`: JSON Lines such as gsm8k_train.jsonl and t0_rag_qa_ccby.jsonl, all optional.
- `--translations`: a folder with any of `python-docs-de/`, `python-docs-es/` and
  `python-docs-fr/`, the translations of Python's documentation (gettext catalogues).
- `--answers`: files that distill wrote; the answers serve as passages.

Rows {"prompt": text, "source": "kind/origin"} are shuffled by the seed. With `--follow-ups` a row
has N further messages of the user, such as "Make it shorter.": {"turns": [text, …], "source": …}.
The same inputs give the same file. Beside it, `<out>.sources.json` states the licence and the
number of prompts of each source.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_export.model import target
from spec_export.training import data
from spec_runtime.files.writing import write_atomically
from tools.figures import command_line, run

WORDING = Path(__file__).with_suffix(".toml")
# Prompts of each kind, in shares of the whole.
SHARES = {
    "summary": 0.14,
    "rag": 0.11,
    "question": 0.09,
    "translation": 0.13,
    "maths": 0.10,
    "code": 0.11,
    "sql": 0.04,
    "lists": 0.05,
    "json": 0.04,
    "extract": 0.03,
    "letters": 0.03,
    "stories": 0.03,
    "roleplay": 0.02,
    "stem": 0.03,
    "humanities": 0.02,
    "reasoning": 0.03,
    "rewrite": 0.04,
    "open": 0.06,
}
LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish"}


@dataclass(frozen=True)
class Passage:
    """A text to ask about, with a question that it answers where the origin has one."""

    text: str
    origin: str
    question: str | None = None


@dataclass(frozen=True)
class Pair:
    """A sentence in a language of LANGUAGES, and in English where both are known."""

    text: str
    language: str
    origin: str
    english: str | None = None


@dataclass(frozen=True)
class Prompt:
    text: str
    kind: str
    origin: str


@dataclass(frozen=True)
class Material:
    """What the kinds draw on."""

    seeds: Path
    passages: list[Passage]
    pairs: list[Pair]
    wording: dict[str, Any]


def main(words: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--translations", type=Path, default=Path("/nonexistent"))
    parser.add_argument("--answers", type=Path, nargs="*", default=[])
    parser.add_argument("--target", help="whose tokenizer counts tokens; default: the demo")
    parser.add_argument("--count", type=int, default=12000)
    parser.add_argument("--max-tokens", type=int, default=900)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--follow-ups", type=int, default=0)
    arguments = parser.parse_args(words)
    tokenizer = target.load_tokenizer(target.resolve(arguments.target))
    material = gather(arguments.seeds, arguments.translations, arguments.answers, tokenizer)

    def fits(text: str) -> bool:
        return len(tokenizer.encode(text, add_special_tokens=False)) <= arguments.max_tokens

    prompts = draw(material, arguments.count, arguments.seed, fits)
    rows = [row_of(prompt) for prompt in prompts]
    if arguments.follow_ups:
        rows = with_follow_ups(rows, material.wording, arguments.follow_ups, arguments.seed)
    write(rows, material.wording["licences"], arguments.out)


def draw(material: Material, count: int, seed: int, fits: Callable[[str], bool]) -> list[Prompt]:
    """Returns about `count` different prompts, shuffled; a kind without material gives fewer."""
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for kind, share in SHARES.items():
        wanted = round(share * count / sum(SHARES.values()))
        made = MAKERS[kind](material, random.Random(f"{seed} {kind}"))
        # Kinds without an end come to one when they repeat themselves.
        for prompt in itertools.islice(made, 5 * wanted):
            if not wanted:
                break
            if prompt.text not in seen and fits(prompt.text):
                seen.add(prompt.text)
                prompts.append(prompt)
                wanted -= 1
    random.Random(f"{seed} order").shuffle(prompts)
    return prompts


def row_of(prompt: Prompt) -> dict[str, Any]:
    return {"prompt": prompt.text, "source": f"{prompt.kind}/{prompt.origin}"}


def with_follow_ups(
    rows: list[dict[str, Any]], wording: dict[str, Any], count: int, seed: int
) -> list[dict[str, Any]]:
    """Returns rows of conversations: each prompt, and `count` different requests after it."""
    chosen = random.Random(f"{seed} follow-ups")
    asked = wording["requests"]["follow_ups"]
    return [
        {
            "turns": [
                row["prompt"],
                *(filled(text, wording["lists"], chosen) for text in chosen.sample(asked, count)),
            ],
            "source": row["source"],
        }
        for row in rows
    ]


def write(rows: list[dict[str, Any]], licences: dict[str, list[str]], out: Path) -> None:
    """Writes the rows and the table of sources, and prints the table."""
    counts = Counter(row["source"] for row in rows)
    sources = {
        source: {
            "licence": licences[source.split("/")[1]][0],
            "from": licences[source.split("/")[1]][1],
            "prompts": count,
        }
        for source, count in sorted(counts.items())
    }
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(out, lines.encode())
    table = json.dumps(sources, indent=1, ensure_ascii=False) + "\n"
    write_atomically(out.with_name(out.name + ".sources.json"), table.encode())
    for source, entry in sources.items():
        print(f"{entry['prompts']:6}  {source:28}  {entry['licence']}")
    print(f"{len(rows):6}  all, in {out}")


# ---- material ----


def gather(seeds: Path, translations: Path, answers: list[Path], tokenizer: Any) -> Material:
    """Reads whatever is there."""
    passages = [*seed_passages(seeds), *topic_passages()]
    own = [Passage(cut(text), "answers") for path in answers for text in texts(path, tokenizer)]
    own = random.Random("own passages").sample(own, min(len(own), 3 * len(passages)))
    return Material(
        seeds,
        [passage for passage in [*passages, *own] if len(passage.text) >= 300],
        [*catalogue_pairs(translations), *oasst_pairs(seeds)],
        tomllib.loads(WORDING.read_text(encoding="utf-8")),
    )


def seed_rows(path: Path) -> list[dict[str, Any]]:
    """Returns a file's rows, or none if there is no such file."""
    return [row for _, row in data.read_rows(path)] if path.is_file() else []


def texts(path: Path, tokenizer: Any) -> Iterator[str]:
    """Yields the answers of a distilled file that ended by themselves."""
    ends = set(tokenizer.all_special_ids)
    for row in seed_rows(path):
        ids = row.get("response")
        if ids and ids[-1] in ends and len(ids) > 80:
            yield tokenizer.decode(ids[:-1]).strip()


def cut(text: str, limit: int = 2600) -> str:
    """Returns at most `limit` characters, cut at the end of a sentence where there is one."""
    # Wikipedia's remark on an article that is too long is no part of it.
    text = re.sub(r"This article's .*?template message\)|This article's .*? detailed\.", "", text)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    if len(text) <= limit:
        return text
    end = max(text.rfind(mark, 0, limit) for mark in (". ", ".\n", "\n\n"))
    return text[: end + 1 if end > limit // 2 else limit].strip()


def seed_passages(seeds: Path) -> Iterator[Passage]:
    """Yields the passages of the seeds, most of them with a question."""
    for row in seed_rows(seeds / "t0_rag_qa_ccby.jsonl"):
        template, text = row["template"], row["prompt"].strip()
        parts = [part.strip() for part in text.split("\n\n") if part.strip()]
        if template == "quoref_Answer_Question_Given_Context" and len(parts) >= 4:
            yield Passage(cut("\n\n".join(parts[1:-2])), "quoref", parts[-1])
        elif template == "quoref_Read_And_Extract_" and len(parts) >= 2:
            question = parts[0].split("for the question:")[-1].strip()
            yield Passage(cut("\n\n".join(parts[1:])), "quoref", question)
        elif template == "ropes_plain_background_situation" and len(parts) >= 3:
            yield Passage(cut("\n\n".join(parts[:-1])), "ropes", parts[-1])
        elif template == "duorc_ParaphraseRC_answer_question" and "Movie plot: " in text:
            head, plot = text.split("Movie plot: ", 1)
            question = head.split("Question:")[-1].split("Movie plot title:")[0].strip()
            yield Passage(cut(plot), "duorc", question)
        elif template.startswith("duorc_Self") and "movie plot:" in text:
            yield Passage(cut(text.split("movie plot:", 1)[1].strip()), "duorc")
        elif template.startswith("cosmos"):
            context, _, question = text.partition("According to the above context,")
            yield Passage(cut(context), "cosmos", question.split("\n")[-1].strip())
    for row in seed_rows(seeds / "dolly_hhrlhf_1000.jsonl"):
        first, _, rest = dolly_request(row).partition("\n")
        if len(rest) > 300:
            yield Passage(cut(rest), "dolly", first)
    for row in seed_rows(seeds / "oasst1_val_queries.jsonl"):
        if row["lang"] == "en" and len(row["output"]) > 300:
            yield Passage(cut(row["output"]), "oasst1")


def dolly_request(row: dict[str, Any]) -> str:
    request: str = row["prompt"].split("### Instruction:\n")[1].split("\n\n### Response:")[0]
    return request.strip()


def topic_passages() -> Iterator[Passage]:
    """Yields the prose of the help topics that ship with Python."""
    from pydoc_data.topics import topics

    for _, text in sorted(topics.items()):
        paragraphs = re.sub(r'["*`]', "", text).split("\n\n")
        prose = [re.sub(r"\s+", " ", p).strip() for p in paragraphs]
        prose = [p for p in prose if len(p) > 80 and p.count("=") < 3]
        for start in range(0, len(prose), 4):
            yield Passage(cut("\n\n".join(prose[start : start + 4])), "python")


def catalogue_pairs(folder: Path) -> Iterator[Pair]:
    """Yields sentences of Python's translated documentation."""
    for language in LANGUAGES:
        for path in sorted((folder / f"python-docs-{language}").rglob("*.po")):
            for english, text in catalogue(path):
                if min(len(english.split()), len(text.split())) >= 7 and len(text) < 1200:
                    yield Pair(text, language, "python-docs", english)


def catalogue(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (English, translation) of a gettext catalogue, without markup; no plural forms."""
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        if "msgid_plural" in block or "#, fuzzy" in block or "\nmsgstr" not in block:
            continue
        both = []
        for key in ("msgid", "msgstr"):
            found = re.search(rf'^{key} ((?:".*"\n?)+)', block, re.MULTILINE)
            quoted = re.findall(r'"(.*)"', found[1]) if found else []
            both.append(plain("".join(quoted).replace('\\"', '"').replace("\\n", " ")))
        # A placeholder or a listing is no sentence.
        if all(both) and not re.search(r"[%{}\\<>|]|::", both[0] + both[1]):
            yield both[0], both[1]


def plain(text: str) -> str:
    """Returns a text without reStructuredText's markup."""
    text = re.sub(r":[\w:]+:`~?!?([^`<]*)(?:<[^`]*>)?`", r"\1", text)
    text = re.sub(r"`([^`<]*)(?:<[^`]*>)?`_*", r"\1", text)
    return re.sub(r"\s+", " ", re.sub(r"[*`]", "", text)).strip()


def oasst_pairs(seeds: Path) -> Iterator[Pair]:
    """Yields groups of one to three sentences that people wrote in German, French and Spanish."""
    for row in seed_rows(seeds / "oasst1_val_queries.jsonl"):
        if row["lang"] not in LANGUAGES or "```" in row["output"]:
            continue
        sentences = re.split(r"(?<=[.!?])\s+", row["output"])
        start = 0
        for size in (1, 2, 3, 1, 2, 3, 1, 2, 3):
            text = " ".join(sentences[start : start + size]).strip()
            start += size
            if len(text.split()) >= 7:
                yield Pair(text, row["lang"], "oasst1")


# ---- kinds ----


def filled(template: str, lists: dict[str, list[str]], chosen: random.Random) -> str:
    """Returns a request whose {names} are replaced by draws from the lists and small numbers.

    A name's digit ("city2") only tells it from another one of the same list.
    """
    step, start = chosen.randint(2, 9), chosen.randint(1, 20)
    numbers = {
        "n": chosen.randint(3, 48),
        "m": chosen.randint(2, 9),
        "p": chosen.randint(20, 400),
        "q": chosen.choice([5, 10, 15, 20, 25, 30, 40]),
        "d": chosen.randint(1, 28),
        "n2": chosen.randint(22, 67),
        **{f"a{i + 1}": start + step * i for i in range(4)},
    }
    used: set[str] = set()

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name in numbers:
            return str(numbers[name])
        options = [o for o in lists[name.rstrip("23")] if o not in used]
        draw = chosen.choice(options)
        used.add(draw)
        known[name] = draw
        return draw

    known: dict[str, str] = {}

    def once(found: re.Match[str]) -> str:
        # In "reasoning" and "json" the same name stands for the same person throughout.
        return known[found[1]] if found[1] in known and found[1] in REPEATED else value(found)

    return re.sub(r"\{(\w+)\}", once, template)


REPEATED = {"first", "first2", "first3", "last", "last2", "city", "city2", "job", "job2"}


def from_lists(kind: str) -> Callable[[Material, random.Random], Iterator[Prompt]]:
    def made(material: Material, chosen: random.Random) -> Iterator[Prompt]:
        templates, lists = material.wording["requests"][kind], material.wording["lists"]
        while True:
            yield Prompt(filled(chosen.choice(templates), lists, chosen), kind, "own")

    return made


def about_passages(kind: str) -> Callable[[Material, random.Random], Iterator[Prompt]]:
    """Makes requests about a passage. Origins take turns, so that large ones do not crowd."""

    def made(material: Material, chosen: random.Random) -> Iterator[Prompt]:
        limit = 900 if kind == "rewrite" else 2600
        for passage in in_turn(material.passages, chosen):
            template = chosen.choice(material.wording["passage"][kind])
            request = filled(template.replace("{text}", "\0"), material.wording["lists"], chosen)
            yield Prompt(request.replace("\0", cut(passage.text, limit)), kind, passage.origin)

    return made


# How often an origin's turn comes, in a round in which the others have one.
TURNS = {"quoref": 4, "duorc": 3, "dolly": 3, "answers": 8, "oasst1": 3, "cosmos": 2, "ropes": 2}


def in_turn(passages: list[Passage], chosen: random.Random) -> Iterator[Passage]:
    """Yields passages in random order without end; TURNS weighs their origins."""
    left: dict[str, list[Passage]] = {}
    every: dict[str, list[Passage]] = {}
    for passage in passages:
        every.setdefault(passage.origin, []).append(passage)
    if not every:
        return
    origins = sorted(every)
    weights = [TURNS.get(origin, 1.0) for origin in origins]
    while True:
        origin = chosen.choices(origins, weights)[0]
        if not left.get(origin):
            left[origin] = chosen.sample(every[origin], len(every[origin]))
        yield left[origin].pop()


def questions(material: Material, chosen: random.Random) -> Iterator[Prompt]:
    with_question = [p for p in material.passages if p.question]
    for passage in in_turn(with_question, chosen):
        question = str(passage.question)
        template = chosen.choice(material.wording["passage"]["question"])
        text = template.replace("{question_lower}", question[:1].lower() + question[1:])
        text = text.replace("{question}", question).replace("{text}", passage.text)
        yield Prompt(text, "question", passage.origin)


def retrieval(material: Material, chosen: random.Random) -> Iterator[Prompt]:
    """Makes questions over one passage that answers them among one to four that do not."""
    with_question = [p for p in material.passages if p.question]
    others = in_turn(material.passages, chosen)
    headings = ("[{i}] ", "Passage {i}: ", "Document {i}:\n", "({i}) ", "Source {i} - ")
    for passage in in_turn(with_question, chosen):
        chosen_others = [next(others) for _ in range(chosen.randint(1, 4))]
        limit = 2800 // (len(chosen_others) + 1)
        documents = [cut(p.text, limit) for p in (passage, *chosen_others)]
        chosen.shuffle(documents)
        heading = chosen.choice(headings)
        numbered = [heading.format(i=i) + d for i, d in enumerate(documents, start=1)]
        template = chosen.choice(material.wording["passage"]["rag"])
        text = template.replace("{question}", str(passage.question))
        yield Prompt(text.replace("{documents}", "\n\n".join(numbered)), "rag", passage.origin)


def translation(material: Material, chosen: random.Random) -> Iterator[Prompt]:
    """Makes translations; the languages take turns, and seven of ten are into English."""
    by_language = {
        code: by_origin([pair for pair in material.pairs if pair.language == code])
        for code in LANGUAGES
    }
    codes = [code for code in ("de", "de", "fr", "es") if by_language[code]]
    english = in_turn(material.passages, chosen)
    while codes or material.passages:
        wording = material.wording["passage"]
        code = chosen.choice(codes) if codes else chosen.choice(sorted(LANGUAGES))
        if codes and chosen.random() < 0.7:
            pair = chosen.choice(chosen.choice(list(by_language[code].values())))
            template = chosen.choice(wording["into_english"])
            text, origin = pair.text, pair.origin
        else:
            template = chosen.choice(wording["from_english"])
            text, origin = english_sentences(material, by_language[code], english, chosen)
        language = LANGUAGES[code]
        request = template.replace("{source}", language).replace("{target}", language)
        yield Prompt(request.replace("{text}", text), "translation", origin)


def by_origin(pairs: list[Pair]) -> dict[str, list[Pair]]:
    grouped: dict[str, list[Pair]] = {}
    for pair in pairs:
        grouped.setdefault(pair.origin, []).append(pair)
    return grouped


def english_sentences(
    material: Material,
    pairs: dict[str, list[Pair]],
    passages: Iterator[Passage],
    chosen: random.Random,
) -> tuple[str, str]:
    """Returns English text to translate and its origin: a catalogue's, or a passage's beginning."""
    known = [pair for group in pairs.values() for pair in group if pair.english]
    if known and (chosen.random() < 0.3 or not material.passages):
        pair = chosen.choice(known)
        return str(pair.english), pair.origin
    passage = next(passages)
    return cut(passage.text, chosen.choice([120, 250, 500])), passage.origin


def maths(material: Material, chosen: random.Random) -> Iterator[Prompt]:
    problems = seed_rows(material.seeds / "gsm8k_train.jsonl")
    chosen.shuffle(problems)
    wording = material.wording["passage"]
    for row in problems:
        kind = "maths_check" if chosen.random() < 0.15 else "maths"
        answer = re.sub(r"<<.*?>>", "", row["answer"]).replace("\n#### ", "\nAnswer: ")
        text = chosen.choice(wording[kind]).replace("{text}", row["question"])
        yield Prompt(text.replace("{answer}", answer), "maths", "gsm8k")


def code(material: Material, chosen: random.Random) -> Iterator[Prompt]:
    """Makes own requests and mbpp's, in turn by chance."""
    own = from_lists("code")(material, chosen)
    problems = seed_rows(material.seeds / "mbpp_train.jsonl")
    chosen.shuffle(problems)
    while True:
        if not problems or chosen.random() < 0.5:
            yield next(own)
            continue
        row = problems.pop()
        tests = "\n".join(row["test_list"])
        asked = chosen.choice(["", f"\n\nIt has to pass these tests:\n{tests}"])
        yield Prompt(row["text"] + asked, "code", "mbpp")


def sql(material: Material, chosen: random.Random) -> Iterator[Prompt]:
    wording = material.wording["passage"]
    questions_with_schema = seed_rows(material.seeds / "spider_dev_with_schema.jsonl")
    queries = seed_rows(material.seeds / "defog_sql_eval.jsonl")
    chosen.shuffle(questions_with_schema)
    chosen.shuffle(queries)
    for row in questions_with_schema:
        text = chosen.choice(wording["sql"]).replace("{schema}", row["context"])
        yield Prompt(text.replace("{question}", row["question"]), "sql", "spider")
        if queries and chosen.random() < 0.7:
            query = queries.pop()["query"].split(";")[0]
            yield Prompt(
                chosen.choice(wording["sql_explain"]).replace("{query}", query), "sql", "defog"
            )


def open_requests(material: Material, chosen: random.Random) -> Iterator[Prompt]:
    """Takes requests of the seeds as they are."""
    seeds = material.seeds
    found: list[Prompt] = []

    def add(text: str, origin: str) -> None:
        found.append(Prompt(text, "open", origin))

    for row in seed_rows(seeds / "dolly_hhrlhf_1000.jsonl"):
        add(dolly_request(row), "dolly")
    for row in seed_rows(seeds / "oasst1_val_queries.jsonl"):
        if row["lang"] in ("en", *LANGUAGES):
            first = row["text"].split("### Assistant:")[0].removeprefix("### Human:")
            add(first.strip(), "oasst1")
    for name in ("self_instruct_seed_tasks", "self_instruct_user_oriented"):
        for row in seed_rows(seeds / f"{name}.jsonl"):
            text = f"{row['instruction']}\n\n{row['instances'][0]['input']}".strip()
            add(text, "self_instruct")
    for row in seed_rows(seeds / "llms_from_scratch_instruction.jsonl")[::3]:
        add(f"{row['instruction']}\n\n{row['input']}".strip(), "llms_from_scratch")
    for row in seed_rows(seeds / "triviaqa_sub.jsonl")[::20]:
        text = row["context"].removeprefix("Question: ").removesuffix("\nAnswer:")
        add(text, "triviaqa")
    for row in seed_rows(seeds / "nq_open_dev.jsonl")[::20]:
        add(row["question"][:1].upper() + row["question"][1:] + "?", "nq")
    for row in seed_rows(seeds / "t0_rag_qa_ccby.jsonl"):
        if row["template"].startswith("common_gen") and chosen.random() < 0.05:
            add(row["prompt"].strip(), "common_gen")
    chosen.shuffle(found)
    yield from found


MAKERS: dict[str, Callable[[Material, random.Random], Iterator[Prompt]]] = {
    "question": questions,
    "rag": retrieval,
    "translation": translation,
    "maths": maths,
    "code": code,
    "sql": sql,
    "open": open_requests,
    **{kind: about_passages(kind) for kind in ("summary", "rewrite", "extract")},
    **{
        kind: from_lists(kind)
        for kind in ("lists", "json", "letters", "stories", "roleplay", "stem", "humanities")
    },
    "reasoning": from_lists("reasoning"),
}

if __name__ == "__main__":
    run(main)
