"""Text to token ids and back: byte-level BPE, ChatML, untrusted text, incremental decoding.

    tokenizer = Tokenizer.from_path(folder)
    ids = tokenizer.render([{"role": "user", "content": "Why?"}], add_generation_prompt=True)

Two ways to encode, and the difference is the point. `encode` reads added tokens (`<|im_end|>`,
`<think>`, ...) in the text as the tokens they are: for text that this program wrote.
`encode_untrusted` reads them as plain characters: for everything that came from outside.

Not here: the `tools` block of Qwen3's template (our tools have a grammar of their own), and
re-rendering of rollouts: those extend their ids and are never encoded twice.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers

from .data import replace_surrogates

IM_START, IM_END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
THINK, END_THINK = "<think>", "</think>"

# Qwen3's added tokens in the order of their ids. The first group is marked special, the second not.
SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> "
    "<|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> "
    "<|image_pad|> <|video_pad|>").split()
NOT_SPECIAL = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> "
    "<|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>").split()

# Qwen3's split into words, behind two alternatives that let `<call_tool name="` be one token. Not
# so behind a full stop, which takes `</` along: shipped tokenizers are trained with that.
SPLIT = (r'</?[a-z_]+(?: [a-z]+="?|>)?|">'
         r"|(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
         r"| ?[^\s\p{L}\p{N}<]+[\r\n]*|<|\s*[\r\n]+|\s+(?!\S)|\s+")


class Tokenizer:
    """A byte-level BPE with ChatML's tokens.

    num_valid: number of ids, added tokens included; a model's vocabulary may be padded beyond.
    im_end_id: the id that ends a turn. eos_ids: that one and the eos_token of the settings.
    """

    def __init__(self, trusted: tokenizers.Tokenizer, settings: dict | None = None):
        """`settings` is the content of tokenizer_config.json; without it, ChatML's."""
        self.settings = settings or {"eos_token": IM_END, "pad_token": PAD,
                                     "tokenizer_class": "PreTrainedTokenizerFast"}
        self._trusted = trusted
        # The same model without the added tokens: it cannot make them, whatever the text says.
        self._plain = tokenizers.Tokenizer(trusted.model)
        self._plain.normalizer = trusted.normalizer
        self._plain.pre_tokenizer = trusted.pre_tokenizer
        self._added = {token.content: i for i, token in trusted.get_added_tokens_decoder().items()}
        for token, i in self._added.items():
            if i in self._plain.encode(token).ids:
                raise ValueError(f"tokenizer: merges make {token}, so any text could forge it")
        self.num_valid: int = trusted.get_vocab_size(with_added_tokens=True)
        eos = self.settings.get("eos_token") or IM_END  # a text, or an object that describes it
        eos = eos["content"] if isinstance(eos, dict) else eos
        for token in (IM_START, IM_END, eos):
            if token not in self._added:
                raise ValueError(f"tokenizer: {token} is not among its added tokens")
        self.im_end_id: int = self._added[IM_END]
        self.eos_ids: set[int] = {self.im_end_id, self._added[eos]}

    @classmethod
    def from_path(cls, path: str | Path) -> "Tokenizer":
        """Of a folder with tokenizer.json (and maybe tokenizer_config.json), or of the file."""
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"{file}: no such file; give tokenizer.json or its folder")
        try:
            trusted = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file}: not a readable tokenizer.json ({error})") from None
        return cls(trusted, read_json(file.with_name("tokenizer_config.json")))

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into an existing folder."""
        folder = Path(folder)
        self._trusted.save(str(folder / "tokenizer.json"))
        text = json.dumps(self.settings, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """Ids of text that this program wrote: added tokens in it are read as such."""
        return self._trusted.encode(replace_surrogates(text), add_special_tokens=False).ids

    def encode_untrusted(self, text: str) -> list[int]:
        """Ids of text from outside: never one of an added token, whatever the text says."""
        return self._plain.encode(replace_surrogates(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, added tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self._trusted.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for. ValueError for an id that the tokenizer lacks."""
        token = self._trusted.id_to_token(token_id)
        if token is None:
            raise ValueError(f"token id {token_id} is not in the tokenizer ({self.num_valid} ids)")
        if not BYTE_OF.keys() >= set(token):  # an added token beyond the byte alphabet
            return token.encode()
        return bytes(BYTE_OF[character] for character in token)

    def render(self, messages: Sequence[dict], add_generation_prompt: bool = False,
               enable_thinking: bool | None = None) -> list[int]:
        """Ids of a chat, as Qwen3's template writes it (without its `tools` block).

        messages: dicts with `role` (system, user, assistant, tool) and `content`; an assistant's
        may have `reasoning_content` and `tool_calls`. Thinking is dropped from assistant turns
        before the last question. enable_thinking False opens the new turn with closed thinking.
        Contents are encoded as untrusted text. Assistant text keeps `<think>` and `</think>` as
        tokens, and only these: a quoted `<|im_end|>` in an answer cannot end its turn.
        """
        parts = chat_parts(messages)
        if add_generation_prompt:
            parts += [(IM_START, True), ("assistant\n", False)]
            if enable_thinking is False:
                parts += [(THINK, True), ("\n\n", False), (END_THINK, True), ("\n\n", False)]
        ids, text = [], ""
        for part, is_token in parts:  # what stands between two tokens is encoded in one piece
            if is_token and part in self._added:
                ids += self.encode_untrusted(text) + [self._added[part]]
                text = ""
            else:
                text += part
        return ids + self.encode_untrusted(text)


class IncrementalDecoder:
    """Text of a growing list of ids: all that it returned plus `flush()` is `decode` of the whole.

    It sees only what is pushed, so a prompt that ends within a character changes nothing.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this id completes; "" while a character lacks bytes."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """End of the stream: U+FFFD where a character was left incomplete, else ""."""
        return self._utf8.decode(b"", final=True)


Part = tuple[str, bool]  # text, and whether it is an added token of the framing


def chat_parts(messages: Sequence[dict]) -> list[Part]:
    """A chat in pieces; adjacent plain pieces belong together."""
    contents = [message_text(message, i) for i, message in enumerate(messages)]
    last_question = last_question_index(messages, contents)
    parts: list[Part] = []
    for i, (message, content) in enumerate(zip(messages, contents, strict=True)):
        role = message.get("role")
        if role in ("system", "user"):
            parts += [(IM_START, True), (f"{role}\n{content}", False)]
        elif role == "assistant":
            thinks, is_last = i > last_question, i == len(messages) - 1
            parts += [(IM_START, True), ("assistant\n", False)]
            parts += assistant_parts(message, content, thinks, is_last)
        elif role == "tool":
            if i == 0 or messages[i - 1].get("role") != "tool":
                parts += [(IM_START, True), ("user", False)]
            parts += [("\n", False), ("<tool_response>", True), (f"\n{content}\n", False),
                      ("</tool_response>", True)]
            if i + 1 < len(messages) and messages[i + 1].get("role") == "tool":
                continue  # results of one turn share its frame
        else:
            raise ValueError(f"message {i}: role {role!r} is not system, user, assistant or tool")
        parts += [(IM_END, True), ("\n", False)]
    return parts


def message_text(message: dict, index: int) -> str:
    """The content of a message; "" where tool calls stand in its place."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if not isinstance(content, str):
        raise ValueError(f"message {index}: content must be a string, not {type(content).__name__}")
    return content


def last_question_index(messages: Sequence[dict], contents: list[str]) -> int:
    """Index of the last user message that is no tool response in disguise, else of the last one."""
    for i, text in reversed(list(enumerate(contents))):
        is_response = text.startswith("<tool_response>") and text.endswith("</tool_response>")
        if messages[i].get("role") == "user" and not is_response:
            return i
    return len(messages) - 1


def assistant_parts(message: dict, content: str, is_current: bool, is_last: bool) -> list[Part]:
    """An assistant turn without its frame. Only turns after the last question keep thinking."""
    thinking = message.get("reasoning_content")
    if thinking is None:
        thinking = ""
        if END_THINK in content:
            before, after = content.split(END_THINK)[0], content.split(END_THINK)[-1]
            thinking = before.rstrip("\n").split(THINK)[-1].lstrip("\n")
            content = after.lstrip("\n")
    parts: list[Part] = []
    if is_current and (is_last or thinking):
        parts += [(THINK, True), ("\n", False), *think_parts(thinking.strip("\n")), ("\n", False),
                  (END_THINK, True), ("\n\n", False)]
        content = content.lstrip("\n")
    parts += think_parts(content)
    for i, call in enumerate(message.get("tool_calls") or ()):
        call = call.get("function", call)
        arguments = call["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        body = f'\n{{"name": "{call["name"]}", "arguments": {arguments}}}\n'
        parts += [("\n" if content or i else "", False), ("<tool_call>", True), (body, False),
                  ("</tool_call>", True)]
    return parts


def think_parts(text: str) -> list[Part]:
    """Text split at its think tags, which become tokens."""
    return [(part, part in (THINK, END_THINK)) for part in re.split("(</?think>)", text) if part]


def stop_ids(model_folder: str | Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every id that ends generation, sorted: those of the model's files and the tokenizer's own."""
    return tuple(sorted(tokenizer.eos_ids | model_end_ids(Path(model_folder))))


def model_end_ids(folder: Path) -> set[int]:
    """`eos_token_id` (a number, a list or null) of config.json and generation_config.json."""
    ends: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        eos = (read_json(folder / name) or {}).get("eos_token_id")
        ends.update([eos] if isinstance(eos, int) else eos or ())
    return ends


def train_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A small byte-level BPE with Qwen3's added tokens behind it.

    vocab_size counts all of it: 256 bytes, merges and 26 added tokens; a small corpus gives fewer
    merges. Added tokens in the texts are cut out before training: the library would give a merge
    that makes the text of an added token the same id.
    """
    added = SPECIAL + NOT_SPECIAL
    if vocab_size < 256 + len(added):
        raise ValueError(f"vocab_size {vocab_size} is below 256 bytes + {len(added)} added tokens")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - len(added), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    cut = re.compile("|".join(map(re.escape, added)))
    bpe.train_from_iterator((piece for text in texts for piece in cut.split(text)), trainer)
    bpe.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    bpe.add_tokens([AddedToken(t, normalized=False, special=False) for t in NOT_SPECIAL])
    return bpe


def read_json(path: Path) -> dict | None:
    """The object in a JSON file; None where there is no file."""
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a JSON object ({error})") from None


def byte_alphabet() -> dict[str, int]:
    """The byte of each character of byte-level BPE (GPT-2): itself if printable, else U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


BYTE_OF = byte_alphabet()
