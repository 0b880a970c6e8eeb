"""What these examples ask about: five offices, each with a document of one paragraph."""

import random

import httpx
from prometheus_client.parser import text_string_to_metric_families

FACTS = (
    "The {city} office opened in {year} and has {number} rooms on {small} floors.",
    "Its access code is {number}{small}, and it changes every {small} weeks.",
    "The reception is staffed from {small} in the morning by {name}.",
    "Parcels for {city} go to dock {number}, behind the garage with {number} places.",
    "The canteen serves {number} meals a day and closes in the last week of the year.",
    "{name} keeps the keys of the archive, which holds {number} boxes.",
    "Visitors of {city} sign at desk {small} and get a badge that is valid for {small} days.",
    "The nearest station is {number} metres away, and a bus leaves every {small} minutes.",
    "Its network was renewed in {year} by {name}, who answers calls under extension {number}.",
    "Meeting rooms are booked for {small} hours at most, and the largest one seats {number} people.",
    "In {year} the roof was repaired for {number} thousand, paid over {small} years.",
    "The library of {city} lends {number} books and asks for them back after {small} weeks.",
    "Bicycles stand in the yard, where {name} repairs them on day {small} of each month.",
    "An alarm is tested at {small} o'clock, and everybody meets at gate {number}.",
)
NAMES = ("Anna Berg", "Tom Vance", "Li Wei", "Omar Haddad", "Eva Novak", "Sam Ortiz")
CITIES = ("Paris", "Lisbon", "Oslo", "Vienna", "Dublin")
QUESTION = "What is the access code of the Paris office?"


def document(city: str) -> str:
    rng = random.Random(city)
    values = {
        "number": lambda: rng.randrange(100, 1000),
        "small": lambda: rng.randrange(2, 10),
        "year": lambda: rng.randrange(1950, 2020),
        "name": lambda: rng.choice(NAMES),
    }
    return " ".join(fact.format(city=city, **{k: value() for k, value in values.items()}) for fact in FACTS)


DOCUMENTS = [document(city) for city in CITIES]


def model_of(url: str) -> str:
    """The name of the model that the server has."""
    return httpx.get(f"{url}/v1/models", timeout=30).raise_for_status().json()["data"][0]["id"]


def reused_tokens(url: str) -> int:
    """How many tokens of prompts the server has read from records until now."""
    while True:
        metrics = httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text
        samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
        if not any(sample.value for sample in samples if sample.name == "vllm:num_requests_running"):
            return int(sum(s.value for s in samples if s.name == "vllm:hypic_tokens_reused_total"))


def show(url: str, ask) -> None:
    """Ask twice, the second time with the documents in another order."""
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        before = reused_tokens(url)
        answer = ask(url, documents, QUESTION)
        print(f"answer: {answer.strip()!r}, reused tokens: {reused_tokens(url) - before}")
