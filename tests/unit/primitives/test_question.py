"""The question of a chat in the forms of several templates: the user's last message."""

import re
from collections.abc import Sequence

import pytest

from vllm_hypic.primitives.windows import Words

SPECIAL = re.compile(r"<\|[^|]*\|>|\[/?INST\]|</?s>")
TOKEN = re.compile(rf"{SPECIAL.pattern}| ?\w+| ?[^\w\s]|\s+")
DOCUMENT = "The Paris office opened in 1990 and has a red door. " * 3
ANSWER = "The Paris office has a red door and opened in the year 1990 according to the first document above."
FIRST, ASKED = "What door has the Paris office?", "Which access code has Oslo?"
CALL = '{"name": "bob and alice and carol and dave and erin and frank and more"}'
HARMONY = f"<|start|>user<|message|>{DOCUMENT}{FIRST}<|end|>"
GRANITE = (
    f"<|start_of_role|>user<|end_of_role|>{DOCUMENT}{FIRST}<|end_of_text|>\n"
    f"<|start_of_role|>assistant<|end_of_role|>{ANSWER}<|end_of_text|>\n"
)
PHI = (
    f"<|im_start|>user<|im_sep|>{DOCUMENT}{FIRST}<|im_end|><|im_start|>assistant<|im_sep|>{ANSWER}<|im_end|>"
)

CHATS = {
    "gpt-oss": (
        f"{HARMONY}<|start|>assistant<|channel|>final<|message|>{ANSWER}<|end|>"
        f"<|start|>user<|message|>{ASKED}<|end|><|start|>assistant"
    ),
    "gpt-oss, a tool that is named get_user": (
        f"<|start|>user<|message|>{DOCUMENT}{ASKED}<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_user <|constrain|>json<|message|>"
        f"{CALL}<|call|><|start|>functions.get_user to=assistant<|channel|>commentary<|message|>"
        f"{ANSWER}<|end|><|start|>assistant"
    ),
    "Granite 3": f"{GRANITE}<|start_of_role|>user<|end_of_role|>{ASKED}<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>",
    "Phi-4": f"{PHI}<|im_start|>user<|im_sep|>{ASKED}<|im_end|><|im_start|>assistant<|im_sep|>",
    "Mistral": f"<s>[INST] {DOCUMENT}{FIRST}[/INST] {ANSWER}</s>[INST] {ASKED}[/INST]",
    "GLM": f"<|user|>\n{DOCUMENT}{ASKED}<|assistant|>\n<think></think>\n",
    "GLM, a tool's result": f"<|user|>\n{DOCUMENT}{ASKED}<|assistant|>\n{CALL}<|observation|>\n{ANSWER}"
    "<|assistant|>\n",
    "Command R": (
        f"<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{DOCUMENT}{ASKED}<|END_OF_TURN_TOKEN|>"
        f"<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{ANSWER}<|END_OF_TURN_TOKEN|>"
    ),
    "ChatML": f"<|im_start|>user\n{DOCUMENT}{FIRST}<|im_end|>\n<|im_start|>assistant\n{ANSWER}<|im_end|>\n"
    f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n",
}


# Their headers are ordinary text, and only the ends of messages are special.
PLAIN = {
    "Zephyr": f"@user@\n{DOCUMENT}{FIRST}</s>\n@assistant@\n{ANSWER}</s>\n@user@\n{ASKED}</s>\n@assistant@\n",
    "OpenChat": f"GPT4 Correct User: {DOCUMENT}{FIRST}</s>GPT4 Correct Assistant: {ANSWER}</s>"
    f"GPT4 Correct User: {ASKED}</s>GPT4 Correct Assistant:",
    "MiniMax": f"<|b|>user name=u\n{ASKED}<|e|>\n<|b|>ai name=assistant\n",
}


@pytest.mark.parametrize("template", PLAIN)
def test_a_header_of_ordinary_text_is_no_question(template: str) -> None:
    first, stop, tokens = question_of(PLAIN[template])
    assert "".join(tokens[first:stop]).endswith(ASKED)


@pytest.mark.parametrize("template", CHATS)
def test_the_question_is_the_users_last_message(template: str) -> None:
    first, stop, tokens = question_of(CHATS[template])
    found = "".join(tokens[first:stop])
    assert found.endswith(ASKED) and found.removesuffix(ASKED).strip() in ("", DOCUMENT.strip())


def question_of(chat: str) -> tuple[int, int, list[str]]:
    tokens = TOKEN.findall(chat)
    assert "".join(tokens) == chat
    names = list(dict.fromkeys(tokens))
    special = {i: name for i, name in enumerate(names) if SPECIAL.fullmatch(name)}

    def texts(ids: Sequence[int]) -> list[str]:
        return ["\n" if i in special else names[i] for i in ids]

    return *Words(texts, special).question_in([names.index(token) for token in tokens]), tokens
