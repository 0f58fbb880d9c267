"""`load_renderer(folder)`: selects the renderer of a model folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agentrl.domain.schemas import Json
from agentrl.errors import ModelFolderError, RequestError
from agentrl.rendering.renderer import Renderer
from agentrl.rendering.templates.chatml_renderer import END, START, ChatMLRenderer
from agentrl.rendering.templates.format_probing import knows_tools
from agentrl.rendering.templates.model_folder import ModelFolder, read_folder
from agentrl.rendering.templates.template_renderer import TemplateRenderer

PROBE: list[Json] = [
    {"role": "user", "content": " What is\n1 < 2? "},
    {"role": "assistant", "content": "\ntrue\n"},
    {"role": "user", "content": "é"},
]
"""A probe with text that templates often change: outer white space, line breaks, non-ASCII characters."""


def load_renderer(model_dir: Path, name: str | None = None) -> Renderer:
    """The renderer of a model folder.

    `name`, or `{"renderer": NAME}` in the folder's renderer.json, selects `chatml`, `template`, or a family of the
    `renderers` package. Otherwise the first that reproduces the folder's chat template is used: ChatML, a family, or
    the generic template renderer. Raises ModelFolderError when no format reads the template's tool calls.
    """
    folder = read_folder(model_dir)
    if (chosen := name or folder.renderer) is not None:
        if chosen in FORMATS:
            return FORMATS[chosen](folder)
        from agentrl.rendering.templates.families import load_family

        return load_family(folder, chosen, others=FORMATS)
    if (plain := plain_chatml(folder)) is not None:
        return plain
    from agentrl.rendering.templates.families import find_family

    return find_family(folder) or _readable(generic(folder), folder)


def chatml(folder: ModelFolder) -> ChatMLRenderer:
    """The ChatML renderer with the template's default system prompt."""
    return ChatMLRenderer(
        folder.tokenizer(),
        default_system=_default_system(folder),
        vocab_size=folder.vocab_size,
        max_context=folder.max_context,
    )


def _readable(renderer: TemplateRenderer, folder: ModelFolder) -> Renderer:
    """Raise ModelFolderError for a template whose tool calls cannot be parsed."""
    assert folder.template is not None
    if not renderer.reads_calls and knows_tools(folder.template):
        model = folder.config.get("model_type") or "this model"
        raise ModelFolderError(
            f"the chat template of {model} in {folder.path} writes tool calls in a format that cannot be read exactly; "
            'to serve it without tools, write {"renderer": "template"} into its renderer.json'
        )
    return renderer


def generic(folder: ModelFolder) -> TemplateRenderer:
    """The generic renderer over the folder's template."""
    if folder.template is None:
        raise ModelFolderError(f"model folder {folder.path} has no chat template and no ChatML tokens")
    return TemplateRenderer(folder)


FORMATS: dict[str, Callable[[ModelFolder], Renderer]] = {"chatml": chatml, "template": generic}
"""The renderers that a folder or a caller may name, beside the families."""


def plain_chatml(folder: ModelFolder) -> ChatMLRenderer | None:
    """The ChatML renderer, if the folder's template produces the same ids or is missing; else None."""
    if folder.template is not None and "tool" in folder.template.source:
        return None
    tokenizer = folder.tokenizer()
    if tokenizer.token_to_id(START) is None or tokenizer.token_to_id(END) is None:
        return None
    if folder.template is None:
        return chatml(folder)
    try:
        text = folder.template.render(PROBE)
    except RequestError:  # the template does not accept this text
        return None
    renderer = chatml(folder)
    return renderer if renderer.render(PROBE, None) == tokenizer.encode(text, add_special_tokens=False).ids else None


def _default_system(folder: ModelFolder) -> str | None:
    """The template's system message for conversations without one."""
    if folder.template is None:
        return None
    text = folder.template.render(PROBE)
    opening, closing = f"{START}system\n", f"{END}\n{START}user\n"
    return text.removeprefix(opening).partition(closing)[0] if text.startswith(opening) else None
