"""Chat templates of model families for tests, written after the published ones: the same layout of
turns, tools, calls, results and reasoning, without their long instructions. `{% generation %}`
blocks, which most published templates lack, are around what the model writes."""

from __future__ import annotations

import re

#: Special tokens of the templates.
SPECIAL_TOKENS = (
    "<|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <start_of_turn> "
    "<end_of_turn> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] <|start|> <|message|> <|channel|> <|end|> <|return|> <|call|> <｜User｜> "
    "<｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
    "<｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> "
    "<｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
).split()

# Qwen/Qwen3-8B: reasoning only after the last question, results as a user's turn.
_QWEN3 = """\
{%- if tools or messages[0].role == 'system' -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages[0].role == 'system' -%}{{- messages[0].content -}}{%- endif -%}
    {%- if tools -%}
        {{- '\\n\\n# Tools\\n<tools>' -}}
        {%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) -}}{%- endfor -%}
        {{- '\\n</tools>' -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- set ns = namespace(last=0) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') -%}
        {%- set ns.last = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else '' -%}
    {%- if message.role == 'user' -%}
        {{- '<|im_start|>user\\n' ~ content ~ '<|im_end|>\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set reasoning = '' -%}
        {%- if message.reasoning_content is string -%}
            {%- set reasoning = message.reasoning_content -%}
        {%- elif '</think>' in content -%}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- generation -%}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) -%}
            {{- '<think>\\n' ~ reasoning.strip('\\n') ~ '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- content -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '\\n' if content or not loop.first else '' -}}
            {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
            {{- call.function.arguments | tojson ~ '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>' -}}
        {%- endgeneration -%}
        {{- '\\n' -}}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' else '' -}}
        {{- '\\n<tool_response>\\n' ~ content ~ '\\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
            {{- '<|im_end|>\\n' -}}
        {%- endif -%}
    {%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
"""

# meta-llama/Llama-3.1-8B-Instruct: the tools stand in the first question, one call a turn, without
# text beside it; results as JSON.
_LLAMA_31 = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content | trim -%}
    {%- set messages = messages[1:] -%}
{%- else -%}
    {%- set system = '' -%}
{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' ~ system ~ '<|eot_id|>' -}}
{%- if tools is not none -%}
    {%- set question = messages[0].content | trim -%}
    {%- set messages = messages[1:] -%}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {%- for tool in tools -%}{{- tool | tojson(indent=4) ~ '\\n\\n' -}}{%- endfor -%}
    {{- question ~ '<|eot_id|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if 'tool_calls' in message -%}
        {%- if message.tool_calls | length != 1 -%}
            {{- raise_exception('This model only supports single tool-calls at once!') -}}
        {%- endif -%}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {%- set call = message.tool_calls[0].function -%}
        {%- generation -%}
        {{- '{"name": "' ~ call.name ~ '", "parameters": ' ~ (call.arguments | tojson) -}}
        {{- '}<|eot_id|>' -}}
        {%- endgeneration -%}
    {%- elif message.role in ('tool', 'ipython') -%}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' -}}
        {{- (message.content | tojson) ~ '<|eot_id|>' -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {%- generation -%}{{- message.content | trim ~ '<|eot_id|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' -}}
        {{- message.content | trim ~ '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt else '' -}}
"""

# google/gemma-3-1b-it: the system message stands in the first question; no tools.
_GEMMA_3 = """\
{{- bos_token -}}
{%- set first = messages[0].content ~ '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- set turns = messages[1:] if first else messages -%}
{%- for message in turns -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Conversation roles must alternate user/assistant/...') -}}
    {%- endif -%}
    {%- if message.role == 'assistant' -%}
        {{- '<start_of_turn>model\\n' -}}
        {%- generation -%}{{- message.content | trim ~ '<end_of_turn>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- '<start_of_turn>user\\n' ~ (first if loop.first else '') -}}
        {{- message.content | trim ~ '<end_of_turn>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{{- '<start_of_turn>model\\n' if add_generation_prompt else '' -}}
"""

# HuggingFaceTB/SmolLM3-3B, whose published template has the blocks: they hold the header, too.
# Tools are called xml_tools; calls are part of the content.
_SMOLLM3 = """\
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{{- '<|im_start|>system\\n' -}}
{{- messages[0].content ~ '\\n' if messages[0].role == 'system' else '' -}}
{%- if xml_tools -%}
    {{- 'Write each call as <tool_call>{"name": ..., "arguments": ...}</tool_call>\\n' -}}
    {%- for tool in xml_tools -%}{{- (tool | tojson) ~ '\\n' -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else '' -%}
    {%- if message.role == 'user' -%}
        {{- '<|im_start|>user\\n' ~ content ~ '<|im_end|>\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {%- generation -%}
        {{- '<|im_start|>assistant\\n' -}}
        {{- '' if enable_thinking else '<think>\\n\\n</think>\\n' -}}
        {{- content.lstrip('\\n') ~ '<|im_end|>\\n' -}}
        {%- endgeneration -%}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>user\\n' ~ content ~ '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' ~ ('' if enable_thinking else '<think>\\n\\n</think>\\n') -}}
{%- endif -%}
"""

# mistralai/Mistral-Nemo-Instruct-2407: system message and tools stand at the last question; ids of
# nine characters.
_MISTRAL = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set turns = messages[1:] if system else messages -%}
{%- set ns = namespace(last=-1) -%}
{%- for message in turns -%}
    {%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in turns -%}
    {%- if message.role == 'user' -%}
        {%- if loop.index0 == ns.last and tools -%}
            {{- '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' -}}
        {%- endif -%}
        {{- '[INST]' -}}
        {{- system ~ '\\n\\n' if loop.index0 == ns.last and system else '' -}}
        {{- message.content ~ '[/INST]' -}}
    {%- elif message.tool_calls is defined and message.tool_calls is not none -%}
        {%- generation -%}
        {{- '[TOOL_CALLS][' -}}
        {%- for call in message.tool_calls -%}
            {%- if call.id is not defined or call.id | length != 9 -%}
                {{- raise_exception('Tool call IDs should be of length 9!') -}}
            {%- endif -%}
            {{- (call.function | tojson)[:-1] ~ ', "id": "' ~ call.id ~ '"}' -}}
            {{- ', ' if not loop.last else '' -}}
        {%- endfor -%}
        {{- ']' ~ eos_token -}}
        {%- endgeneration -%}
    {%- elif message.role == 'assistant' -%}
        {%- generation -%}{{- message.content ~ eos_token -}}{%- endgeneration -%}
    {%- elif message.role == 'tool' -%}
        {{- '[TOOL_RESULTS]{"content": ' ~ (message.content | tojson) ~ ', "call_id": "' -}}
        {{- message.tool_call_id ~ '"}[/TOOL_RESULTS]' -}}
    {%- endif -%}
{%- endfor -%}
"""

# NousResearch/Hermes-3-Llama-3.1-8B, variant tool_use: ChatML, results in turns of role tool.
_HERMES = """\
{{- bos_token -}}
{%- if tools -%}
    {{- '<|im_start|>system\\nYou are a function calling AI model. <tools> ' -}}
    {%- for tool in tools -%}{{- (tool | tojson) ~ '\\n' -}}{%- endfor -%}
    {{- '</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.role == 'assistant' and message.tool_calls is defined -%}
        {%- generation -%}
        {{- message.content or '' -}}
        {%- for call in message.tool_calls -%}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
            {{- (call.function.arguments | tojson) ~ '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>' -}}
        {%- endgeneration -%}
    {%- elif message.role == 'assistant' -%}
        {%- generation -%}{{- message.content ~ '<|im_end|>' -}}{%- endgeneration -%}
    {%- elif message.role == 'tool' -%}
        {{- '<tool_response>\\n' ~ message.content ~ '\\n</tool_response><|im_end|>' -}}
    {%- else -%}
        {{- message.content ~ '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
"""

# openai/gpt-oss-20b: channels; reasoning is called thinking, and is kept only before the last
# answer, and before calls that no answer follows.
_GPT_OSS = """\
{{- '<|start|>system<|message|>You are ChatGPT.<|end|>' -}}
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set turns = messages[1:] if system else messages -%}
{%- if system or tools -%}
    {{- '<|start|>developer<|message|>' ~ system -}}
    {%- for tool in tools or [] -%}
        {{- '\\n// ' ~ tool.function.description ~ '\\ntype ' ~ tool.function.name -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
{%- endif -%}
{%- set ns = namespace(name='') -%}
{%- for message in turns -%}
    {%- if message.role == 'assistant' and 'tool_calls' in message -%}
        {%- if message.content and message.thinking -%}
            {{- raise_exception('Cannot pass both content and thinking!') -}}
        {%- endif -%}
        {%- set later = turns[loop.index:] | selectattr('role', 'equalto', 'assistant') -%}
        {%- set later = later | selectattr('tool_calls', 'undefined') | list -%}
        {%- set thinking = message.thinking or message.content -%}
        {{- '<|start|>assistant' -}}
        {%- generation -%}
        {%- if thinking and not later -%}
            {{- '<|channel|>analysis<|message|>' ~ thinking ~ '<|end|><|start|>assistant' -}}
        {%- endif -%}
        {%- set ns.name = message.tool_calls[0].function.name -%}
        {{- ' to=functions.' ~ ns.name ~ '<|channel|>commentary json<|message|>' -}}
        {{- (message.tool_calls[0].function.arguments | tojson) ~ '<|call|>' -}}
        {%- endgeneration -%}
    {%- elif message.role == 'assistant' -%}
        {{- '<|start|>assistant' -}}
        {%- generation -%}
        {%- if loop.last and 'thinking' in message -%}
            {{- '<|channel|>analysis<|message|>' ~ message.thinking ~ '<|end|>' -}}
            {{- '<|start|>assistant' -}}
        {%- endif -%}
        {{- '<|channel|>final<|message|>' ~ message.content -}}
        {{- '<|return|>' if loop.last else '<|end|>' -}}
        {%- endgeneration -%}
    {%- elif message.role == 'tool' -%}
        {{- '<|start|>functions.' ~ ns.name ~ ' to=assistant<|channel|>commentary<|message|>' -}}
        {{- (message.content | tojson) ~ '<|end|>' -}}
    {%- else -%}
        {{- '<|start|>user<|message|>' ~ message.content ~ '<|end|>' -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|start|>assistant' if add_generation_prompt else '' -}}
"""

# deepseek-ai/DeepSeek-R1 of January 2025: no tools, arguments as texts, calls only without content,
# reasoning is always cut.
_R1_OLD = """\
{%- set ns = namespace(is_tool=false) -%}
{{- bos_token -}}
{{- messages[0].content if messages[0].role == 'system' else '' -}}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- '<｜User｜>' ~ message.content -}}
    {%- elif message.role == 'assistant' and message['content'] is none -%}
        {{- '<｜Assistant｜>' -}}
        {%- generation -%}
        {{- '<｜tool▁calls▁begin｜>' -}}
        {%- for call in message.tool_calls -%}
            {{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call.function.name -}}
            {{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' -}}
        {%- endfor -%}
        {{- '<｜tool▁calls▁end｜>' + eos_token -}}
        {%- endgeneration -%}
    {%- elif message.role == 'assistant' -%}
        {{- '<｜tool▁outputs▁end｜>' if ns.is_tool else '<｜Assistant｜>' -}}
        {%- set ns.is_tool = false -%}
        {%- generation -%}
        {{- message.content.split('</think>')[-1] + eos_token -}}
        {%- endgeneration -%}
    {%- elif message.role == 'tool' -%}
        {{- '<｜tool▁outputs▁begin｜>' if not ns.is_tool else '' -}}
        {%- set ns.is_tool = true -%}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' -}}
    {%- endif -%}
{%- endfor -%}
{{- '<｜tool▁outputs▁end｜>' if ns.is_tool and add_generation_prompt else '' -}}
{{- '<｜Assistant｜>' if add_generation_prompt and not ns.is_tool else '' -}}
"""

#: Templates with blocks, by family.
WITH_BLOCKS = {
    "qwen3": _QWEN3,
    "llama3.1": _LLAMA_31,
    "gemma3": _GEMMA_3,
    "smollm3": _SMOLLM3,
    "mistral": _MISTRAL,
    "hermes": _HERMES,
    "gpt-oss": _GPT_OSS,
    "deepseek-r1-old": _R1_OLD,
    # The later version prompts with the beginning of the reasoning.
    "deepseek-r1": _R1_OLD.replace(
        "{{- '<｜Assistant｜>' if add", "{{- '<｜Assistant｜><think>\\n' if add"
    ),
}
WITHOUT_BLOCKS = {
    name: re.sub(r"\{%- (end)?generation -%\}", "", template)
    for name, template in WITH_BLOCKS.items()
}
