"""One offline HTML page from a template, with every name in it shown as it is."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from qknorm.lab.printable import printable


def render(package: str, template: str, **values: Any) -> str:
    """Return the page. What is not marked as safe is escaped, and what does not print is spelled out.

    Raises ValueError without the `report` extra.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ValueError("a page needs an extra: pip install 'qknorm[report]'") from error
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    source = files(package).joinpath(template).read_text("utf-8")
    return environment.from_string(source).render(**values)


def _shown(value: Any) -> Any:
    is_safe = hasattr(value, "__html__")
    return printable(value) if isinstance(value, str) and not is_safe else value
