"""Render an HTML page from a template. Names of others cannot change the page."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from qknorm.lab.printable import printable


def render(package: str, template: str, **values: Any) -> str:
    """Render a page.

    All values are escaped unless they are marked as safe, and characters that do not print are spelled
    out.

    Args:
        package: the package that holds the template.
        template: file name of the template.
        values: the variables of the template.

    Returns:
        The page.

    Raises:
        ValueError: the `report` extra is not installed.
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
