"""`load_renderer(folder)`: the renderer that speaks a model's own chat format."""

from __future__ import annotations

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
"""A conversation with what templates tend to change: outer white space, line breaks, characters beyond ASCII."""


def load_renderer(model_dir: Path, name: str | None = None) -> Renderer:
    """The renderer of a model folder.

    `name`, or `{"renderer": NAME}` in the folder's renderer.json, decides: `chatml`, `template`, or a family of the
    `renderers` package. Otherwise the first that reproduces the folder's own chat template: ChatML, a family that
    knows the model, the generic bridge over the template.
    Raises ModelFolderError where the template writes tool calls that no format reads back.
    """
    folder = read_folder(model_dir)
    match name or folder.renderer:
        case "chatml":
            return chatml(folder)
        case "template":
            return generic(folder)
        case str(family):
            from agentrl.rendering.templates.families import load_family

            return load_family(folder, family)
    if (plain := plain_chatml(folder)) is not None:
        return plain
    from agentrl.rendering.templates.families import find_family

    return find_family(folder) or _readable(generic(folder), folder)


def chatml(folder: ModelFolder) -> ChatMLRenderer:
    """Our ChatML, with the template's own default system prompt."""
    return ChatMLRenderer(
        folder.tokenizer(),
        default_system=_default_system(folder),
        vocab_size=folder.vocab_size,
        max_context=folder.max_context,
    )


def _readable(renderer: TemplateRenderer, folder: ModelFolder) -> Renderer:
    """Raises ModelFolderError for a template whose tool calls would stay text: an agent would never see them."""
    assert folder.template is not None
    if not renderer.reads_calls and knows_tools(folder.template):
        model = folder.config.get("model_type") or "this model"
        raise ModelFolderError(
            f"the chat template of {model} in {folder.path} writes tool calls in a format that cannot be read exactly; "
            'to serve it without tools, write {"renderer": "template"} into its renderer.json'
        )
    return renderer


def generic(folder: ModelFolder) -> TemplateRenderer:
    """The bridge over whatever template the folder has."""
    if folder.template is None:
        raise ModelFolderError(f"model folder {folder.path} has no chat template and no ChatML tokens")
    return TemplateRenderer(folder)


def plain_chatml(folder: ModelFolder) -> ChatMLRenderer | None:
    """Our ChatML where the folder's template writes just that, id by id, or where there is no template."""
    tokenizer = folder.tokenizer()
    if tokenizer.token_to_id(START) is None or tokenizer.token_to_id(END) is None:
        return None
    if folder.template is None:
        return chatml(folder)
    if "tool" in folder.template.source:
        return None
    try:
        text = folder.template.render(PROBE)
    except RequestError:  # a template that wants something else than text
        return None
    renderer = chatml(folder)
    return renderer if renderer.render(PROBE, None) == tokenizer.encode(text, add_special_tokens=False).ids else None


def _default_system(folder: ModelFolder) -> str | None:
    """What the template puts into a system turn when a conversation has none."""
    if folder.template is None:
        return None
    text = folder.template.render(PROBE)
    opening, closing = f"{START}system\n", f"{END}\n{START}user\n"
    return text.removeprefix(opening).partition(closing)[0] if text.startswith(opening) else None
