"""Prompt templates: how a problem becomes the text that is tokenised, with the extractor that belongs to it.

A template has a way of asking (the sentence for maths) and a wrapper (plain text, the tokenizer's chat template, or
the ChatML that Qwen2.5-Math was trained with). Code problems keep the wrapper and ask for a program instead of a
boxed answer, so that one template serves every benchmark of a run.

The system sentence of `qwen_math` is the model's own standard. The other sentences are ours: they ask for the format
that the DAPO and Polaris recipes ask for, not in their words.
"""

from dataclasses import dataclass
from typing import Any, Literal

from evals.problems import Problem

QWEN_MATH_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
BOXED_SYSTEM = "Work through the problem one step at a time and end with the final answer inside \\boxed{}."
CODE_SYSTEM = "You write correct and efficient Python programs."

CODE_STDIN = (
    "{question}\n\nWrite a Python program for this task. It reads its input from standard input and prints "
    "nothing but what the task asks for. Reply with the whole program in one ```python code block."
)
CODE_STARTER = (
    "{question}\n\nComplete the Python code below, keeping its names and signature:\n"
    "```python\n{starter}\n```\nReply with the whole program in one ```python code block."
)


@dataclass(frozen=True)
class Template:
    """How to ask, and how the answer to it is found.

    Attributes:
        name: the key in `TEMPLATES`; part of every result.
        maths: what the user says, with `{question}` in it.
        system: the system message for maths problems, if any.
        wrapper: `plain` text; `chat`, the tokenizer's chat template; `chatml`, written out.
        extractor: passed to `evals.grading.grade`.
    """

    name: str
    maths: str = "{question}"
    system: str | None = None
    wrapper: Literal["plain", "chat", "chatml"] = "chat"
    extractor: str = "any"

    def render(self, problem: Problem, tokenizer: Any = None) -> str:
        """The text to be tokenised, without further special tokens.

        A tokenizer without a chat template gets the messages as paragraphs; the prompt kept with every sample shows
        which of the two it was.
        """
        if self.wrapper == "plain":
            return self.maths.replace("{question}", problem.question)
        if problem.is_code:
            system: str | None = CODE_SYSTEM
            user = code_request(problem)
        else:
            system = self.system
            user = self.maths.replace("{question}", problem.question)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": user})
        if self.wrapper == "chatml":
            turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
            return "".join(turns) + "<|im_start|>assistant\n"
        if getattr(tokenizer, "chat_template", None):
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return "\n\n".join(str(m["content"]) for m in messages) + "\n\n"


def code_request(problem: Problem) -> str:
    """What the user says for a code problem: a program over standard input, or starter code to complete."""
    starter = problem.starter_code.rstrip()
    if not starter and not problem.fn_name:
        return CODE_STDIN.replace("{question}", problem.question)
    starter = starter or f"def {problem.fn_name}("
    return CODE_STARTER.replace("{starter}", starter).replace("{question}", problem.question)


TEMPLATES = {
    template.name: template
    for template in (
        Template("qa", maths="Q: {question}\nA:", wrapper="plain"),
        Template("chat"),
        Template("boxed", system=BOXED_SYSTEM),
        Template("qwen_math", system=QWEN_MATH_SYSTEM, wrapper="chatml"),
        Template(
            "dapo",
            maths="Work through this problem step by step. Make the last line of your reply `Answer: $Answer`, "
            "where $Answer stands for the result.\n\n{question}\n\n"
            "The answer belongs on a line of its own after `Answer:`.",
            extractor="answer_line",
        ),
        Template("polaris", maths="{question} Think step by step and give the final answer in \\boxed{}."),
    )
}


def get_template(name: str) -> Template:
    """The template of that name.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if name not in TEMPLATES:
        raise ValueError(f"unknown prompt template {name!r}; known: {', '.join(TEMPLATES)}")
    return TEMPLATES[name]
