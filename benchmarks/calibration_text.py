"""Writes the calibration text that the package ships: our openings and questions, continued by SmolLM2-135M-Instruct.

A model's own text is close to what it will meet, and needs nobody's permission: the openings are ours, the model is
under Apache-2.0. Tokens drawn at temperature 1 run in circles less than at lower ones; pieces are short for the same
reason.

    python benchmarks/calibration_text.py smollm2-135m calibration.jsonl < more.txt

Standard input holds further documents, with lines of "%%" between them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paceline import LLM, SamplingParams

CONTINUATIONS = 3
PIECE_TOKENS = 140
SEPARATOR = "\n%%\n"

OPENINGS = (
    "The old harbour master had not spoken to his brother for eleven years, and on the morning when the letter came he",
    '"You are late again," said Mrs. Penrose, without looking up from her account book. "I suppose the bridge',
    "It was towards the end of November, during a thaw, when the night coach from the north set down a "
    "single passenger",
    "My grandmother kept bees. Every evening in June she would carry a kitchen chair to the bottom of the garden and",
    '"I saw him," the boy whispered. "He came out of the chapel with a lantern, and his coat was wet through, and',
    "The advertisement had been short and curiously worded. It asked for a person of steady habits, able "
    "to read a map,",
    "We found the tracks a little before dawn. They led from the stable door across the frozen yard, then stopped",
    "Of all the rooms in that great, draughty house, I liked the library best. It had one tall window, and",
    '"My dear sir," he replied, with a smile that did not reach his eyes, "a man in my position does not gamble. I',
    "The captain folded the chart, laid his hand upon it, and looked round at the four of us as though",
    "She had married him for his laugh, and in the third winter of the war, when he no longer laughed at anything, she",
    "Nobody in the village could say when the mill had last turned. The wheel was green with moss, and children",
    '"Is it true," asked the doctor, "that you were in the house the whole of that evening?"\n"Quite '
    'true," I answered.',
    "The train stopped between two stations, as trains will, and for a quarter of an hour nothing moved but",
    "There is a kind of silence that comes only after heavy snow. Martin stood at the gate and listened to it, and",
    "Two men came out of the inn and walked down the lane together, talking in low voices. The taller of "
    "them, who wore",
    "Upon the table lay a small brass key, half a sheet of paper torn across, and the stump of a candle.",
    '"Why did you come back?" she asked. He turned his hat round and round in his hands before he answered.',
    "In my first year at the bank I was given a desk under the stairs, a bottle of ink, and the strict "
    "instruction never",
    "The gentleman who called on me that Thursday was stout, red-faced and out of breath, and began to speak before",
    "Rain had fallen on the city for nine days. On the tenth the river came over the lower quay, and",
    "When the fever had left him, my uncle told me the story that he had kept to himself for thirty years.",
    "Once upon a time, in a country where winter lasted for ten months of the year, there lived a clockmaker who",
    "The robot had been told to water the plants, and so it watered them, every morning, long after the people",
    "A lighthouse keeper sees more than ships. In the summer of 1887 I wrote in the log each night, as I was bound to,",
    "Photosynthesis is the process by which green plants turn light into chemical energy. It takes place in",
    "The Roman road network was one of the great works of ancient engineering. At its largest it reached",
    "Volcanoes form where molten rock from below finds its way to the surface. Most of them lie along",
    "Inflation is a rise in the general level of prices. Economists measure it by following the cost of",
    "The human heart beats about a hundred thousand times a day. Its four chambers work in pairs:",
    "In mathematics, a prime number is a whole number greater than one that has no divisors other than one and itself.",
    "The printing press changed Europe more quickly than any army. Within fifty years of its invention,",
    "Sleep is not a single state. Over the course of a night the brain passes several times through",
    "Coral reefs cover less than one percent of the sea floor, yet they shelter about a quarter of",
    "Why do we see the same face of the Moon all the time? The answer lies in the way that gravity",
    "The committee met on Tuesday to discuss the new bus timetable. Several residents of the eastern districts said",
    "LONDON, 4 March - Shares rose on Monday after the central bank left its main rate unchanged for the third time,",
    "The home side won by two goals to one on Saturday, though for the first hour hardly anybody in the "
    "ground would have",
    "Dear Ms. Alvarez,\n\nThank you for your letter of 12 May about the delayed delivery. We are sorry that",
    "Subject: Notes from Friday's planning meeting\n\nHi all,\n\nhere is what we agreed on and who does what:\n",
    "How to change a bicycle tyre\n\n1. Turn the bicycle upside down and open the brake.\n2.",
    "Tomato soup with basil\n\nServes four. You need:\n- 1 kg ripe tomatoes\n- 2 onions\n-",
    "Packing list for a week in the mountains:\n- two pairs of walking socks\n- rain jacket\n-",
    "| Year | Population | Change |\n| --- | --- | --- |\n| 1990 | 48,210 | |\n| 1995 | 50,377 | +4.5% |\n| 2000 |",
    "The train leaves at 9:40 and takes 2 hours and 35 minutes. It stops for 12 minutes on the way. To "
    "find when it arrives,",
    "A shop sells pencils at 3 for $1.20. How much do 14 pencils cost? First we find the price of one pencil:",
    "Let x be the number of adult tickets and y the number of child tickets. We know that x + y = 120 and",
    "Question: What is the difference between weather and climate?\nAnswer:",
    "Chapter 3: Sets and functions\n\nDefinition 3.1. A set is a collection of distinct objects. We write",
    'def read_scores(path):\n    """Reads a CSV file of names and scores and returns a dict."""\n    scores = {}\n',
    'import random\n\n\nclass Deck:\n    """A deck of playing cards."""\n\n    def __init__(self):\n',
    "// Returns the length of the longest word in a sentence.\nfunction longestWord(sentence) {\n",
    "#include <stdio.h>\n\nint main(void) {\n    int numbers[10];\n",
    "SELECT customers.name, SUM(orders.total) AS total\nFROM customers\n",
    '{\n  "name": "weather-station",\n  "version": "2.1.0",\n  "sensors": [\n    {"id": 1, "type": "temperature",',
    "# Installation\n\nYou need Python 3.10 or later. Create a virtual environment and install the "
    "package:\n\n```bash\n",
    "<html>\n<head>\n<title>Opening hours</title>\n</head>\n<body>\n<h1>Town Museum</h1>\n",
    "The moon was up, the tide was low,\nAnd I had seven miles to go;\n",
    "SCENE II. A kitchen. Evening. ANNA is peeling potatoes; her FATHER enters with a wet umbrella.\n\nFATHER:",
    "Interviewer: You grew up in a lighthouse. What do people always ask you about it?\nGuest:",
)

QUESTIONS = (
    "What is the capital of Australia, and why is it not Sydney?",
    "Write a short story about a fox who wants to learn to read.",
    "Explain recursion to a ten-year-old.",
    "Give me five tips for a job interview.",
    "Write a Python function that checks whether a string is a palindrome, and explain how it works.",
    "What is the difference between a virus and a bacterium?",
    "Plan a three-day trip to Lisbon for a family with two small children.",
    "Summarise the causes of the First World War in one paragraph.",
    "Write a polite email asking my landlord to repair the heating.",
    "How does a refrigerator keep food cold?",
    "I feel tired all the time. What could I change in my day?",
    "Write a detective scene in which the inspector notices a muddy boot.",
    "What are the main parts of an essay?",
    "Translate into French and explain the grammar: I have been waiting for you for two hours.",
    "A car drives 150 km in 2 hours and then 90 km in 1.5 hours. What is its average speed?",
    "Compare solar power with wind power.",
    "Describe a busy street market in a hot country.",
    "Why is the sky blue?",
    "List ten animals that live in Africa and one fact about each.",
    "What should I consider before I adopt a dog?",
    "Write a dialogue between a grandmother and her grandson about the first telephone in the village.",
    "How do I make bread without yeast?",
    "What is compound interest? Show it with numbers.",
    "Explain what an API is, with an example.",
)


def main() -> None:
    """Arguments: MODEL OUT."""
    model, out = sys.argv[1:]
    llm = LLM(model, max_batch=32)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = list(OPENINGS) * CONTINUATIONS + [llm.chat_tokens(messages) for messages in chats]
    params = [
        SamplingParams(
            temperature=1.0,
            top_p=0.98,
            frequency_penalty=0.2,
            max_tokens=PIECE_TOKENS if isinstance(prompt, str) else 2 * PIECE_TOKENS,
            seed=seed,
        )
        for seed, prompt in enumerate(prompts)
    ]
    texts = [completion.text for completion in llm.generate(prompts, params)]
    num_pieces = len(OPENINGS) * CONTINUATIONS
    lines: list[dict[str, object]] = [
        {"text": opening + text} for opening, text in zip(list(OPENINGS) * CONTINUATIONS, texts, strict=False)
    ]
    for messages, text in zip(chats, texts[num_pieces:], strict=True):
        lines.append({"messages": [*messages, {"role": "assistant", "content": text}]})
    lines += [{"text": text} for text in sys.stdin.read().split(SEPARATOR) if text.strip()]
    written = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    Path(out).write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
