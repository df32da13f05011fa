"""Prompts of benchmarks: real English of any length and the questions of a chat, the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

TEXT = """\
When in the Course of human events, it becomes necessary for one people to dissolve the political bands which
have connected them with another, and to assume among the powers of the earth, the separate and equal station
to which the Laws of Nature and of Nature's God entitle them, a decent respect to the opinions of mankind
requires that they should declare the causes which impel them to the separation.

We hold these truths to be self-evident, that all men are created equal, that they are endowed by their
Creator with certain unalienable Rights, that among these are Life, Liberty and the pursuit of Happiness. That
to secure these rights, Governments are instituted among Men, deriving their just powers from the consent of
the governed, That whenever any Form of Government becomes destructive of these ends, it is the Right of the
People to alter or to abolish it, and to institute new Government, laying its foundation on such principles
and organizing its powers in such form, as to them shall seem most likely to effect their Safety and
Happiness. Prudence, indeed, will dictate that Governments long established should not be changed for light
and transient causes; and accordingly all experience hath shewn, that mankind are more disposed to suffer,
while evils are sufferable, than to right themselves by abolishing the forms to which they are accustomed. But
when a long train of abuses and usurpations, pursuing invariably the same Object evinces a design to reduce
them under absolute Despotism, it is their right, it is their duty, to throw off such Government, and to
provide new Guards for their future security. Such has been the patient sufferance of these Colonies; and such
is now the necessity which constrains them to alter their former Systems of Government. The history of the
present King of Great Britain is a history of repeated injuries and usurpations, all having in direct object
the establishment of an absolute Tyranny over these States. To prove this, let Facts be submitted to a candid
world.

He has refused his Assent to Laws, the most wholesome and necessary for the public good. He has forbidden his
Governors to pass Laws of immediate and pressing importance, unless suspended in their operation till his
Assent should be obtained; and when so suspended, he has utterly neglected to attend to them. He has refused
to pass other Laws for the accommodation of large districts of people, unless those people would relinquish
the right of Representation in the Legislature, a right inestimable to them and formidable to tyrants only. He
has called together legislative bodies at places unusual, uncomfortable, and distant from the depository of
their public Records, for the sole purpose of fatiguing them into compliance with his measures. He has
dissolved Representative Houses repeatedly, for opposing with manly firmness his invasions on the rights of
the people. He has refused for a long time, after such dissolutions, to cause others to be elected; whereby
the Legislative powers, incapable of Annihilation, have returned to the People at large for their exercise;
the State remaining in the mean time exposed to all the dangers of invasion from without, and convulsions
within. He has endeavoured to prevent the population of these States; for that purpose obstructing the Laws
for Naturalization of Foreigners; refusing to pass others to encourage their migrations hither, and raising
the conditions of new Appropriations of Lands. He has obstructed the Administration of Justice, by refusing
his Assent to Laws for establishing Judiciary powers. He has made Judges dependent on his Will alone, for the
tenure of their offices, and the amount and payment of their salaries. He has erected a multitude of New
Offices, and sent hither swarms of Officers to harrass our people, and eat out their substance. He has kept
among us, in times of peace, Standing Armies without the Consent of our legislatures. He has affected to
render the Military independent of and superior to the Civil power.

In every stage of these Oppressions We have Petitioned for Redress in the most humble terms: Our repeated
Petitions have been answered only by repeated injury. A Prince whose character is thus marked by every act
which may define a Tyrant, is unfit to be the ruler of a free people. Nor have We been wanting in attentions
to our British brethren. We have warned them from time to time of attempts by their legislature to extend an
unwarrantable jurisdiction over us. We have reminded them of the circumstances of our emigration and
settlement here. We have appealed to their native justice and magnanimity, and we have conjured them by the
ties of our common kindred to disavow these usurpations, which, would inevitably interrupt our connections and
correspondence. They too have been deaf to the voice of justice and of consanguinity. We must, therefore,
acquiesce in the necessity, which denounces our Separation, and hold them, as we hold the rest of mankind,
Enemies in War, in Peace Friends.
"""
"""The Declaration of Independence (1776), abridged; in the public domain."""

QUESTIONS = (
    "I have a free week in autumn and like old towns and long walks. Where in Korea should I go?",
    "How would I get there from Seoul, and how long does it take?",
    "Which of those places would you visit first, and why?",
    "What should I eat there that I cannot find elsewhere?",
    "I do not eat meat. Which of these dishes are still fine for me?",
    "What would a day there cost, with a bed for the night?",
    "Please name three walks of less than four hours.",
    "What is the weather like at that time, and what should I pack?",
    "How do I say thank you and good morning?",
    "Now put all of this into a plan for five days.",
)
"""What the person says in a chat."""


class Encoder(Protocol):
    """What turns text into tokens."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def prompt_tokens(encoder: Encoder, num_tokens: int, *, offset: int = 0) -> list[int]:
    """``num_tokens`` tokens of the text, repeated as needed, starting at token ``offset``: another offset, another
    prompt."""
    text = encoder.encode(TEXT.replace("\n", " ").replace("  ", "\n\n"), add_special_tokens=False)
    return [text[at % len(text)] for at in range(offset, offset + num_tokens)]


def distinct_prompts(encoder: Encoder, count: int, num_tokens: int) -> Sequence[list[int]]:
    """``count`` prompts of ``num_tokens`` tokens, no two with the same beginning: each starts with its number, spelt in
    tokens, where there is room for it."""
    vocabulary = sorted(set(prompt_tokens(encoder, 512)))
    digits = max(1, math.ceil(math.log(max(count, 2), len(vocabulary))))
    prompts = []
    for index in range(count):
        number = [vocabulary[index // len(vocabulary) ** place % len(vocabulary)] for place in range(digits)]
        prompts.append((number + prompt_tokens(encoder, num_tokens, offset=7 * index))[:num_tokens])
    return prompts
