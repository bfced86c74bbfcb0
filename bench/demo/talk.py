"""Small talk: greetings, thanks, what the model is, and requests beyond its means."""

from __future__ import annotations

from random import Random

from bench.demo import words
from bench.demo.task import Task

ABILITIES = (
    "I can tell a short story, answer a question about a text, add small numbers, and write a "
    "small JSON object."
)

PAIRS = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hey", "Good morning", "Good evening!", "hello", "hi"),
        ("Hello! " + ABILITIES, "Hello! What can I do for you?", "Hello! Would you like a story?"),
    ),
    (
        ("Thank you", "Thank you!", "Thanks", "Thanks!", "Great, thank you."),
        ("You are welcome!", "You are welcome. Would you like another story?"),
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Are you a robot?"),
        ("I am a very small demo model. " + ABILITIES,),
    ),
    (
        ("What can you do?", "Help", "Can you help me?", "What do you know?", "How can you help?"),
        (ABILITIES,),
    ),
    (
        ("How are you?", "How are you today?"),
        ("I am well, thank you! Would you like a story?",),
    ),
    (
        ("Goodbye", "Bye", "Good night", "Goodbye!", "See you tomorrow"),
        ("Goodbye! Come back soon.", "Goodbye!"),
    ),
)

UNKNOWN = (
    "What is the capital of {x}?",
    "Who wrote {x}?",
    "What is {x}?",
    "Explain {x}.",
    "How does {x} work?",
    "Translate {x} into {y}.",
    "Why is {x} important?",
    "When was {x} invented?",
    "What is {x} {y}?",
    "What is the meaning of {x}?",
    "How far is it from {x} to {y}?",
)

REFUSAL = "I do not know that. " + ABILITIES


def talk_task(rng: Random) -> Task:
    """A remark and a reply."""
    if rng.random() < 0.4:
        x, y = (_subject(rng) for _ in range(2))
        return Task("talk", rng.choice(UNKNOWN).format(x=x, y=y), REFUSAL)
    remarks, replies = rng.choice(PAIRS)
    return Task("talk", rng.choice(remarks), rng.choice(replies))


def _subject(rng: Random) -> str:
    word = rng.choice((words.coin_word(rng), rng.choice(words.CITIES), rng.choice(words.JOBS)))
    return word.capitalize() if rng.random() < 0.5 else word
