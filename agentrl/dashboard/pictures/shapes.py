"""SVG elements. Attributes and text are escaped; styles are classes of `dashboard.css`."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape

from agentrl.visible import visible


def element(tag: str, *inside: Markup | str, **attributes: object) -> Markup:
    """An element. `class_` becomes `class`, `text_anchor` becomes `text-anchor`; floats get one decimal."""
    given = [f'{name.rstrip("_").replace("_", "-")}="{escape(_value(value))}"' for name, value in attributes.items()]
    return Markup(f"<{' '.join([tag, *given])}>{Markup().join(map(escape, inside))}</{tag}>")


def picture(width: float, height: float, label: str, inside: Iterable[Markup]) -> Markup:
    """A picture that scales with its column and is read out by its label."""
    return element(
        "svg", *inside, viewBox=f"0 0 {width:.0f} {height:.0f}", role="group", class_="picture", aria_label=words(label)
    )


def link(href: str, *inside: Markup | str, title: str) -> Markup:
    """A link around shapes, with a tooltip."""
    return element("a", element("title", words(title)), *inside, href=href, aria_label=words(title))


def words(text: str) -> str:
    """Text without control characters."""
    return visible(text)


def _value(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
