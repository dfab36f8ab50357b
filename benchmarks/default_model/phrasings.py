"""Wordings of the questions that the model trains on.

The judge's wordings are in `held_out`. `{f}` stands for a function's name, `{t}` for the task that somebody wants done.
A question is opening + body + closing.
"""

from __future__ import annotations


def lines(block: str) -> tuple[str, ...]:
    """Split a block of text into lines."""
    return tuple(line.strip() for line in block.strip().splitlines())


NAMED = lines(
    """
    What does {f} do?
    What is {f}?
    What's {f}?
    What is {f} for?
    What's {f} for?
    What is {f} used for?
    What do I use {f} for?
    What would I use {f} for?
    Explain {f}.
    Explain {f} to me.
    Explain what {f} does.
    Explain how {f} works.
    Describe {f}.
    Describe what {f} does.
    Tell me about {f}.
    Tell me what {f} does.
    Tell me something about {f}.
    Define {f}.
    {f}
    {f}?
    {f}:
    help({f})
    Help on {f}
    Show help for {f}.
    How does {f} work?
    How does {f} behave?
    How do I use {f}?
    How do you use {f}?
    How is {f} used?
    How do I call {f}?
    How is {f} called?
    What does calling {f} do?
    What does the call {f} do?
    What will {f} do?
    What does {f} return?
    What does {f} give back?
    What do I get from {f}?
    What comes out of {f}?
    What arguments does {f} take?
    What parameters does {f} accept?
    What is the signature of {f}?
    Show me the signature of {f}.
    Which arguments does {f} have?
    What can I pass to {f}?
    What does the docstring of {f} say?
    What is the docstring of {f}?
    Show the documentation of {f}.
    Show the docs for {f}.
    What do the docs say about {f}?
    Look up {f}.
    Documentation: {f}
    Summarize {f}.
    Sum up {f} in a sentence.
    Give me a summary of {f}.
    Give me the gist of {f}.
    Give a one line description of {f}.
    Describe {f} in one sentence.
    I need to understand {f}.
    I don't understand {f}.
    I want to know what {f} does.
    I would like to learn about {f}.
    I saw {f} somewhere, what does it do?
    I found {f} in a script. What does it do?
    There is a call to {f} here. What does it do?
    Somebody wrote {f} in this file, what is that?
    What is the purpose of {f}?
    What is the meaning of {f}?
    What is the use of {f}?
    What is the idea behind {f}?
    What's the deal with {f}?
    When do I use {f}?
    When should I use {f}?
    When would you call {f}?
    Why do people use {f}?
    Why would I need {f}?
    Why does this code call {f}?
    Who needs {f}?
    Do you know {f}?
    Do you know what {f} does?
    Can {f} help me?
    Is {f} useful?
    Have you heard of {f}?
    Teach me {f}.
    Teach me how to use {f}.
    Refresh my memory on {f}.
    Say what {f} does.
    State what {f} does.
    Write a description of {f}.
    Write a comment that explains {f}.
    Let me know what {f} does.
    Let's talk about {f}.
    Any idea what {f} does?
    Not sure about {f}, what does it do?
    Question about {f}: what does it do?
    About {f}
    Info on {f}
    Details on {f}, please.
    {f} explained
    {f} description
    {f} meaning
    {f}, what does it do?
    {f} what is it
    {f} does what?
    {f} is used for what?
    {f}: how does it work?
    # what does {f} do
    Which problem does {f} solve?
    What task does {f} perform?
    What operation does {f} carry out?
    What kind of function is {f}?
    What are the inputs and outputs of {f}?
    """
)

TASK = lines(
    """
    How do I {t}?
    How can I {t}?
    How do you {t}?
    How to {t}?
    How would I {t}?
    How would you {t}?
    How should I {t}?
    how 2 {t}
    What is the way to {t}?
    What's the best way to {t}?
    What is a good way to {t}?
    Is there a way to {t}?
    Is there a function to {t}?
    Is there a function that can {t}?
    Which function can {t}?
    Which function do I use to {t}?
    Which function should I use to {t}?
    Which function lets me {t}?
    Which function will {t}?
    What function can {t}?
    What function do I need to {t}?
    What function is there to {t}?
    What do I call to {t}?
    What do I use to {t}?
    What should I use to {t}?
    What can I use to {t}?
    What helps me {t}?
    I want to {t}.
    I need to {t}.
    I have to {t}. What do I use?
    I would like to {t}.
    I'm trying to {t}.
    I am looking for a function to {t}.
    I need a function to {t}.
    Help me {t}.
    Show me how to {t}.
    Tell me how to {t}.
    Explain how to {t}.
    Give me a function to {t}.
    Find a function to {t}.
    Can I {t}?
    Can you {t}?
    Can Python {t}?
    How does one {t}?
    How does Python {t}?
    Function to {t}
    A function to {t}
    Way to {t}
    {t}
    {t}?
    To {t}, which function do I call?
    If I want to {t}, what do I use?
    When I need to {t}, what should I call?
    Where is the function to {t}?
    What does the standard library have to {t}?
    Does the standard library have something to {t}?
    Do you know how to {t}?
    """
)

OPENINGS = lines(
    """
    Please
    Hi,
    Hello,
    Hi!
    Hello!
    Hey,
    Hey
    OK,
    So,
    Well,
    Now,
    Quick question:
    Question:
    One more thing:
    Python question:
    In Python,
    In Python 3,
    In the standard library,
    Could you
    Can you
    Would you
    Can you please
    Could you please
    Can you tell me:
    Excuse me,
    Sorry,
    Thanks!
    Good morning.
    I am new to Python.
    I am learning Python.
    I'm a beginner.
    I'm stuck.
    """
)

CLOSINGS = lines(
    """
    please
    Thanks!
    Thank you.
    Thanks in advance
    in Python
    in Python 3
    in the standard library
    in one sentence
    in short
    in simple terms
    briefly
    exactly
    again
    for me
    Be brief.
    Keep it short.
    Answer in one sentence.
    I am new to Python.
    I'm a beginner.
    I need it for my project.
    I forgot.
    I can't remember.
    """
)
