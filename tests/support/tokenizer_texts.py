"""Texts that tell tokenizers apart: real ones, and mixtures of what their rules look at."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The first article of the Universal Declaration of Human Rights.
ARTICLES = [
    "All human beings are born free and equal in dignity and rights. They are endowed with reason "
    "and conscience and should act towards one another in a spirit of brotherhood.",
    "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und "
    "Gewissen begabt und sollen einander im Geist der Brüderlichkeit begegnen.",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de "
    "raison et de conscience et doivent agir les uns envers les autres dans un esprit de "
    "fraternité.",
    "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están "
    "de razón y conciencia, deben comportarse fraternalmente los unos con los otros.",
    "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом "
    "и совестью и должны поступать в отношении друг друга в духе братства.",
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
    "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق. وقد وهبوا عقلاً وضميرًا.",
    "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền lợi.",
    "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar.",
    "ყველა ადამიანი იბადება თავისუფალი და თანასწორი თავისი ღირსებითა და უფლებებით.",
]

SPACES = [
    " ", "  ", "   ", "    ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", "\x0b",
    "\x0c", "\x85", "\u00a0", "\u1680", "\u2003", "\u2009", "\u202f", "\u205f", "\u2028",
    "\u2029", "\u3000", "\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u180e", "\u2581",
    "\u2581\u2581",
]  # fmt: skip
MARKS = [
    "e\u0301", "a\u0301\u0302\u0303", "\u0301", " \u0308", "ﬁ", "ǅ", "ß", "İ", "ı", "ſ", "Å",
    "\u212b", "가", "\u1100\u1161\u11a8", "क्षि", "ที่", "ế", "e\u0302\u0301", "ﷺ", "ё",
    "\u0435\u0308",
]  # fmt: skip
EMOJI = [
    "😀", "👨\u200d👩\u200d👧\u200d👦", "👍🏽", "🏳️\u200d🌈", "🇩🇪🇫🇷", "❤️", "☃", "✅", "1️⃣",
    "🧑🏿\u200d🚀", "😶\u200d🌫️",
]  # fmt: skip
NUMBERS = [
    "0", "7", "42", "314", "2024", "31415", "1234567890", "3.14", "1,000,000", "-5", "1e-9",
    "½", "²", "Ⅻ", "٣٤٥", "१२३", "１２３", "𝟙𝟚", "①", "0x1F", "12:30",
]  # fmt: skip
WORDS = [
    "hello", "World", "the", "I", "HTTPServer", "camelCase", "snake_case", "naïve", "Ünïcode",
    "привет", "Ἑλλάς", "שלום", "مرحبا", "日本語", "中文字", "한국어", "कमल", "ไทย", "x", "ab",
    "aba", "ababa", "aaaa", "ſt", "𝓗𝓮𝓵𝓵𝓸", "ＡＢＣ", "ǆ", "straße",
]  # fmt: skip
ENDINGS = ["'s", "'S", "'t", "'re", "'RE", "'Ve", "'m", "'ll", "'LL", "'d", "’s", "'x", "'ſ", "''s"]
SIGNS = [
    "...", "!!", "?!", "==", "->", "/*", "*/", "//", "\\", "#", "$", "€", "%", "&&", "||",
    "(", ")", "[", "]", "{", "}", "<", ">", "\"", "`", "```", "~", "^", "_", "__", "—", "…",
    "«»", "。", "、", "！", "/\n", ".\n", ";\n\n", "@", "|>", "<|",
]  # fmt: skip
CONTROLS = [chr(c) for c in (*range(32), 0x7F, *range(0x80, 0xA0), 0xAD, 0xFFFD)]
ODD = [
    "\ue000",
    "\ufdd0",
    "\uffff",
    "\U0010ffff",
    "\U000e0001",
    "\U00010348",
    "\ud7ff",
    "\U0001d17a",
]
SPELLED = [
    "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "[INST]",
    "[/INST]", "<0x41>", "<0x0A>", "<|im_", "</s", "<pad>", "<extra>", "<usr>", "[PAD1500]",
    "[PAD32000]",
    "<|eot_id|>", "<think>",
]  # fmt: skip

EDGES = [
    "", " ", "  ", "   ", "\n", " \n", "\t", "a", " a", "a ", "  a", "a  ", " a ", "a  b",
    "a   b", "    a\n    b", "\n a", "▁", "▁a", " ▁a", "\u3000a", "\u00a0a", "\x00", "\x00a",
    "a\x00b",
]  # fmt: skip


@cache
def snippets() -> tuple[str, ...]:
    """Real text: problems, prose, code, other languages."""
    problems = (ROOT / "rksc" / "data" / "gsm8k_test_40.jsonl").read_text("utf-8").splitlines()
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    files += [*sorted((ROOT / "rksc").glob("*.py"))[:12], *sorted((ROOT / "csrc").rglob("*.c"))[:6]]
    return (
        *(json.loads(row)["question"] for row in problems),
        *(path.read_text("utf-8") for path in files),
        *ARTICLES,
    )


def corpus() -> list[str]:
    """Sentences to train small vocabularies on."""
    return [line for text in snippets() for line in text.split("\n") if line.strip()]


def texts(n: int, seed: int = 0) -> list[str]:
    """The edges, then n texts from a fixed seed."""
    rng = random.Random(seed)
    return EDGES + [_text(rng) for _ in range(n)]


def _text(rng: random.Random) -> str:
    if rng.random() < 0.3:
        source = rng.choice(snippets())
        at = rng.randrange(max(1, len(source)))
        return source[at : at + rng.choice((5, 40, 200, 600))]
    kinds = rng.sample(
        [
            SPACES,
            MARKS,
            EMOJI,
            NUMBERS,
            WORDS,
            ENDINGS,
            SIGNS,
            CONTROLS,
            ODD,
            SPELLED,
            WORDS,
            SPACES,
        ],
        rng.randint(1, 5),
    )
    parts = [rng.choice(rng.choice(kinds)) for _ in range(rng.randint(1, 24))]
    parts += [chr(_code_point(rng)) for _ in range(rng.choice((0, 0, 0, 3)))]
    glue = rng.choice(("", "", " ", " "))
    text = glue.join(parts)
    return rng.choice(("", "", " ", "  ", "\n")) + text + rng.choice(("", "", " ", "  ", "\n"))


def _code_point(rng: random.Random) -> int:
    while True:
        code = rng.randrange(rng.choice((0x250, 0x3000, 0x10000, 0x110000)))
        if not 0xD800 <= code < 0xE000:
            return code
