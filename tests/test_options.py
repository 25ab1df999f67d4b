"""An option is said once: commands, requests, readers, typed arguments and pages take it over."""

import inspect
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic
import pytest
import typer
from annotated_types import Ge, Gt, Le
from typer.testing import CliRunner

from spec_runtime.cli.flags import Flags, with_flags
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import from_mapping, parse_json, parse_toml
from spec_runtime.load import LoadOptions
from spec_runtime.options import Option
from spec_runtime.sampling import SamplingParams
from spec_runtime.serve.openai.schemas import sampled_fields
from spec_runtime.serve.settings import ServerLimits
from tools.docs import reference, typed_arguments


@dataclass(frozen=True)
class MoreSampling(SamplingParams):
    """The options of sampling, and one that is added here and nowhere else."""

    mirostat_tau: Annotated[float | None, Gt(0), Le(9), Option("Aim at this surprise")] = None


@dataclass(frozen=True, kw_only=True)
class MoreLoading(LoadOptions):
    """The options of `load`, and one that is added here and nowhere else."""

    num_lanes: Annotated[int, Ge(1), Option("Answers computed at once", unset="one")] = 1


@dataclass(frozen=True, kw_only=True)
class MoreLimits(ServerLimits):
    """The limits of a server, and one that is added here and nowhere else."""

    max_images: Annotated[int, Ge(0), Option("Images of a request")] = 4


ADDED = [
    (MoreSampling, "mirostat_tau", 3.5, 10.0, "Aim at this surprise"),
    (MoreLoading, "num_lanes", 4, 0, "Answers computed at once"),
    (MoreLimits, "max_images", 7, -1, "Images of a request"),
]
added = pytest.mark.parametrize(("declaration", "name", "good", "bad", "help_"), ADDED)


@added
def test_commands_have_its_flag(
    declaration: type, name: str, good: Any, bad: Any, help_: str
) -> None:
    got: list[dict[str, Any]] = []

    def command(options: dict[str, Any]) -> None:
        got.append(options)

    app = typer.Typer()
    app.command()(with_flags(options=Flags(declaration))(command))
    flag = f"--{name.replace('_', '-')}"
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert flag in shown
    assert help_ in shown
    CliRunner().invoke(app, [flag, str(good)], catch_exceptions=False)
    assert got[0][name] == good
    with pytest.raises(UserError, match=f"got {name} {bad}, expected") as caught:
        CliRunner().invoke(app, [flag, str(bad)], catch_exceptions=False)
    assert caught.value.param == name


@added
def test_mappings_constructors_and_pages_have_it(
    declaration: type, name: str, good: Any, bad: Any, help_: str
) -> None:
    for parse, form in ((parse_json, '{{"{}": {}}}'), (parse_toml, "{} = {}")):
        read: Any = from_mapping(declaration, parse(form.format(name, good)), "options")
        assert read == declaration(**{name: good})
        with pytest.raises(UserError, match=rf"options\.{name}: got .* {bad}, expected"):
            from_mapping(declaration, parse(form.format(name, bad)), "options")
    with pytest.raises(UserError, match=f"got {name} 'x', expected"):
        declaration(**{name: "x"})
    assert f"| `{name}` |" in reference.options(declaration)
    assert help_ in reference.options(declaration)
    kind = "int" if isinstance(good, int) else "float | None"
    assert f"    {name}: {kind}\n" in typed_arguments.keys(declaration)


def test_requests_have_it() -> None:
    fields: dict[str, Any] = sampled_fields(MoreSampling)
    model = pydantic.create_model("Body", **fields)
    assert model(mirostat_tau=3).mirostat_tau == 3.0  # type: ignore[attr-defined]
    described = model.model_json_schema()["properties"]["mirostat_tau"]
    assert described["description"] == "Aim at this surprise"
    for bad in (10.0, 0, "3"):
        with pytest.raises(pydantic.ValidationError, match="mirostat_tau"):
            model(mirostat_tau=bad)


def test_typed_arguments_are_those_of_the_declarations() -> None:
    for file, name, declaration in typed_arguments.WRITTEN:
        text = (typed_arguments.ROOT / file).read_text()
        assert typed_arguments.rewritten(text, name, declaration) == text, (
            "run python -m tools.docs.typed_arguments"
        )


def test_help_and_import_need_no_validator() -> None:
    """pydantic is imported by the first thing that is checked."""
    import subprocess

    code = "import sys, spec_runtime, spec_runtime.cli.generate; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert "pydantic" not in inspect.getsource(sys.modules["spec_runtime.options"])
