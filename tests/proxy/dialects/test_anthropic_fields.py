"""Every field that Anthropic's SDK can send has its place here: a new SDK's new field fails until it has one.

`USED` shapes the prompt or the answer, `FREE` is accepted without effect, `NOT` is refused by name, `HEADER` never
comes in a body.
"""

import json
import typing
from typing import Any

import pytest
from anthropic.types import message_create_params as stable
from anthropic.types.beta import (
    beta_content_block_param,
    beta_context_management_config_param,
    beta_output_config_param,
    beta_request_tool_addition_block_param,
    beta_system_message_param,
    beta_text_block_param,
    beta_thinking_config_adaptive_param,
    beta_thinking_config_between_tools_param,
    beta_thinking_config_disabled_param,
    beta_thinking_config_enabled_param,
    beta_thinking_config_param,
    beta_tool_param,
    beta_tool_result_block_param,
    beta_tool_union_param,
    beta_tool_use_block_param,
)
from anthropic.types.beta import message_create_params as beta

from agentrl.errors import RequestError
from agentrl.proxy.dialects.anthropic.messages_dialect import AnthropicMessages

DIALECT = AnthropicMessages()
HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
TOOL = {"name": "calc", "input_schema": SCHEMA}
USE = {"type": "tool_use", "id": "c", "name": "calc", "input": {"x": "1"}}
CACHE = {"type": "ephemeral"}
TEXT = {"type": "text", "text": "x"}
USED, FREE, NOT, HEADER = "used", "free", "not", "header"
BARE: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [HI]}


def decode(**fields: Any) -> Any:
    return DIALECT.decode(json.dumps(BARE | fields).encode())


def conversation(*result: Any, **of_use: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": [USE | of_use]}
    return {"messages": [HI, answer, {"role": "user", "content": list(result)}]}


def told(*blocks: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [HI, {"role": "system", "content": list(blocks) or "Now.", **fields}]}


def names(params: Any) -> set[str]:
    return set(typing.get_type_hints(params))


def kinds(union: Any) -> set[str]:
    """The values of `type` in a union of the SDK's."""
    found: set[str] = set()
    for member in typing.get_args(union):
        hint = typing.get_type_hints(member).get("type") if isinstance(member, type) else None
        found |= {value for value in _values(hint) if isinstance(value, str)}
    return found


def _values(hint: Any) -> list[Any]:
    below = [value for part in typing.get_args(hint) for value in (_values(part) or [part])]
    return below if typing.get_args(hint) else []


REQUEST: dict[str, tuple[str, Any]] = {
    "model": (USED, "other"),
    "max_tokens": (USED, 5),
    "messages": (USED, [{"role": "user", "content": "ho"}]),
    "system": (USED, "Be brief."),
    "tools": (USED, [TOOL]),
    "tool_choice": (USED, {"type": "none"}),
    "stop_sequences": (USED, ["END"]),
    "stream": (USED, True),
    "output_config": (USED, {"format": {"type": "json_schema", "schema": {}}}),
    "thinking": (USED, {"type": "adaptive", "display": "omitted"}),  # `display` says what of the answer is shown
    "cache_control": (FREE, CACHE),
    "metadata": (FREE, {"user_id": "u"}),
    "service_tier": (FREE, "auto"),
    "speed": (FREE, "fast"),
    "inference_geo": (FREE, "us"),
    "diagnostics": (FREE, {"previous_message_id": None}),
    "billing_policy": (FREE, {"type": "billing_policy", "bill_to": "self"}),
    "fallbacks": (FREE, [{"model": "other"}]),
    "fallback_credit_token": (FREE, "t"),
    "context_management": (NOT, {"edits": [{"type": "compact_20260112"}]}),
    "compaction": (NOT, {"type": "summarize"}),
    "container": (NOT, "c"),
    "mcp_servers": (NOT, [{"type": "url", "name": "m", "url": "http://m"}]),
    "thread": (NOT, {"type": "create"}),
    "betas": (HEADER, None),
    "user_profile_id": (HEADER, None),
    "workspace_id": (HEADER, None),
}


def test_every_parameter_of_the_sdk_has_its_place() -> None:
    known = names(stable.MessageCreateParamsStreaming) | names(beta.MessageCreateParamsStreaming)
    assert known == set(REQUEST)


PLAIN_TOOL = {"tools": [TOOL]}
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
PLACES: list[tuple[Any, dict[str, Any], dict[str, tuple[str, Any]]]] = [
    (
        beta_tool_param.BetaToolParam,
        PLAIN_TOOL,
        {
            "name": (USED, {"tools": [TOOL | {"name": "sum"}]}),
            "input_schema": (USED, {"tools": [TOOL | {"input_schema": {"type": "object"}}]}),
            "description": (USED, {"tools": [TOOL | {"description": "Sums."}]}),
            "input_examples": (USED, {"tools": [TOOL | {"input_examples": [{"x": "1"}]}]}),
            "defer_loading": (USED, {"tools": [TOOL | {"defer_loading": True}]}),
            "type": (FREE, {"tools": [TOOL | {"type": "custom"}]}),
            "cache_control": (FREE, {"tools": [TOOL | {"cache_control": CACHE}]}),
            "strict": (FREE, {"tools": [TOOL | {"strict": True}]}),
            "eager_input_streaming": (FREE, {"tools": [TOOL | {"eager_input_streaming": True}]}),
            "allowed_callers": (NOT, {"tools": [TOOL | {"allowed_callers": ["code_execution_20260120"]}]}),
        },
    ),
    (
        beta_output_config_param.BetaOutputConfigParam,
        {},
        {
            "effort": (FREE, {"output_config": {"effort": "max"}}),
            "task_budget": (FREE, {"output_config": {"task_budget": {"type": "tokens", "total": 9}}}),
            "format": (USED, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
        },
    ),
    (
        beta_system_message_param.BetaSystemMessageParam,
        told(),
        {
            "role": (FREE, told()),
            "content": (USED, told(TEXT)),
            "output_config": (FREE, told(output_config={"effort": "low"})),
            "clear_at": (FREE, told(clear_at="next_user_message")),  # test_messages_dialect.py: once the turn is over
        },
    ),
    (
        beta_tool_use_block_param.BetaToolUseBlockParam,
        conversation(TEXT),
        {
            "type": (FREE, conversation(TEXT)),
            "id": (USED, conversation(TEXT, id="d")),
            "name": (USED, conversation(TEXT, name="sum")),
            "input": (USED, conversation(TEXT, input={})),
            "cache_control": (FREE, conversation(TEXT, cache_control=CACHE)),
            "caller": (FREE, conversation(TEXT, caller={"type": "direct"})),
            "toolset_name": (FREE, conversation(TEXT, toolset_name=None)),
        },
    ),
    (
        beta_tool_result_block_param.BetaToolResultBlockParam,
        conversation({"type": "tool_result", "tool_use_id": "c"}),
        {
            "type": (FREE, conversation({"type": "tool_result", "tool_use_id": "c"})),
            "tool_use_id": (NOT, conversation({"type": "tool_result", "tool_use_id": "d"})),
            "content": (USED, conversation({"type": "tool_result", "tool_use_id": "c", "content": "1"})),
            "is_error": (FREE, conversation({"type": "tool_result", "tool_use_id": "c", "is_error": True})),
            "cache_control": (FREE, conversation({"type": "tool_result", "tool_use_id": "c", "cache_control": CACHE})),
            "toolset_name": (FREE, conversation({"type": "tool_result", "tool_use_id": "c", "toolset_name": None})),
        },
    ),
    (
        beta_text_block_param.BetaTextBlockParam,
        {"system": [TEXT]},
        {
            "type": (FREE, {"system": [TEXT]}),
            "text": (USED, {"system": [TEXT | {"text": "y"}]}),
            "citations": (FREE, {"system": [TEXT | {"citations": [{}]}]}),
            "cache_control": (FREE, {"system": [TEXT | {"cache_control": CACHE}]}),
        },
    ),
    (
        beta_thinking_config_enabled_param.BetaThinkingConfigEnabledParam,
        THINKS,
        {
            "type": (USED, {"thinking": {"type": "disabled"}}),
            "budget_tokens": (FREE, {"thinking": {"type": "enabled", "budget_tokens": 2048}}),
            "block_binding": (FREE, {"thinking": {"type": "enabled", "budget_tokens": 9, "block_binding": {}}}),
            "display": (FREE, {"thinking": {"type": "enabled", "budget_tokens": 9, "display": "updates"}}),
        },
    ),
    (
        beta_thinking_config_adaptive_param.BetaThinkingConfigAdaptiveParam,
        THINKS,
        {
            "type": (FREE, {"thinking": {"type": "adaptive"}}),
            "block_binding": (FREE, {"thinking": {"type": "adaptive", "block_binding": {}}}),
            "display": (FREE, {"thinking": {"type": "adaptive", "display": "summarized"}}),
        },
    ),
    (
        beta_thinking_config_between_tools_param.BetaThinkingConfigBetweenToolsParam,
        {},
        {"type": (FREE, {"thinking": {"type": "between_tools"}})},
    ),
    (
        beta_thinking_config_disabled_param.BetaThinkingConfigDisabledParam,
        {},
        {"type": (USED, {"thinking": {"type": "disabled"}})},
    ),
    (
        beta_context_management_config_param.BetaContextManagementConfigParam,
        {},
        {"edits": (FREE, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}})},
    ),
]


@pytest.mark.parametrize(("params", "plain", "fields"), PLACES, ids=[params.__name__ for params, _, _ in PLACES])
def test_every_field_of_a_part_has_its_place(params: Any, plain: Any, fields: dict[str, tuple[str, Any]]) -> None:
    assert set(fields) == names(params)
    for name, (place, body) in fields.items():
        check(name, place, plain, body)


@pytest.mark.parametrize("name", [name for name, (place, _) in REQUEST.items() if place != HEADER])
def test_a_parameter_does_what_its_place_says(name: str) -> None:
    place, value = REQUEST[name]
    check(name, place, {}, {name: value})


def check(name: str, place: str, plain: dict[str, Any], body: dict[str, Any]) -> None:
    if place == NOT:
        with pytest.raises(RequestError) as caught:
            decode(**body)
        assert caught.value.status == 400
        assert name in str(caught.value.param)
        return
    assert (asked_for(body) == asked_for(plain)) == (place == FREE), name


def asked_for(body: dict[str, Any]) -> dict[str, Any]:
    """What a request makes of a body, but for the body itself."""
    request = decode(**body)
    return {field: getattr(request, field) for field in request.__dataclass_fields__ if field != "wire"}


def test_every_kind_of_thinking_is_known() -> None:
    assert kinds(beta_thinking_config_param.BetaThinkingConfigParam) == {
        "adaptive",
        "between_tools",
        "disabled",
        "enabled",
    }


READ = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result", "document", "search_result"}
REFUSED = {
    "image",  # a user's own; in a tool's result a text stands for it
    "advisor_tool_result",
    "bash_code_execution_tool_result",
    "code_execution_tool_result",
    "compaction",
    "container_upload",
    "fallback",
    "mcp_tool_listing",
    "mcp_tool_result",
    "mcp_tool_use",
    "server_tool_use",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "web_fetch_tool_result",
    "web_search_tool_result",
}
IN_SYSTEM = {"tool_addition", "tool_removal"}


def test_every_kind_of_block_has_its_place() -> None:
    assert kinds(beta_content_block_param.BetaContentBlockParam) == READ | REFUSED | IN_SYSTEM
    for kind in REFUSED | IN_SYSTEM:
        with pytest.raises(RequestError) as caught:
            decode(messages=[{"role": "user", "content": [{"type": kind}]}])
        assert caught.value.param == "messages[0].content[0]"


def test_every_kind_of_block_of_a_result_has_its_place() -> None:
    taken = {"text", "image", "document", "search_result", "tool_reference"}
    not_taken = {"browser_state"}  # of a toolset that the policy cannot have
    assert kinds(beta_tool_result_block_param.Content) == taken | not_taken


def test_every_kind_of_block_of_a_system_message_has_its_place() -> None:
    assert kinds(beta_system_message_param.ContentBlock) == {"text"} | IN_SYSTEM
    not_taken = {"mcp_tool_reference", "mcp_toolset_reference"}  # of servers that the policy cannot have
    assert kinds(beta_request_tool_addition_block_param.Tool) == {"tool_reference", "tool_definition"} | not_taken


OF_THE_CLIENT = ("bash_", "browser_toolset_", "computer_", "memory_", "text_editor_")


def test_every_kind_of_tool_is_the_agents_own_left_out_or_refused() -> None:
    for kind in kinds(beta_tool_union_param.BetaToolUnionParam) - {"custom"}:
        tools = [{"type": kind, "name": "n"}, TOOL]
        if kind.startswith(OF_THE_CLIENT):
            with pytest.raises(RequestError) as caught:
                decode(tools=tools)
            assert caught.value.param == "tools[0]"
        else:
            assert decode(tools=tools).left_out == ["n"]
