"""Joins a model's named chat templates into one."""

from collections.abc import Mapping
from typing import Any


def joined(templates: Mapping[str, Any]) -> Any:
    """Returns the template named "default"; where there are tools, it does what the one named
    "tool_use" does, as transformers chooses. None without a default one.

    Each of the two renders what it renders by itself: "%+" and the line breaks after tags keep
    jinja2 from taking white space away.
    """
    default, tool_use = templates.get("default"), templates.get("tool_use")
    if not isinstance(default, str) or not isinstance(tool_use, str):
        return default
    with_tools, without = (source.removesuffix("\n") for source in (tool_use, default))
    return f"{{% if tools %}}\n{with_tools}{{%+ else %}}\n{without}{{%+ endif %}}"
