"""Typeset formulas as MathML, which browsers draw by themselves: no script or font is loaded when a page is read.

In the Markdown they are as GitHub reads them: a block fenced with ```math, or $`...`$ within a line.
"""

import html
import re

from latex2mathml.converter import convert

BLOCK = re.compile(r"^```math\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"\$<code>(.+?)</code>\$")


def on_page_markdown(markdown, page, config, files):
    """Replace each block by its MathML."""
    return BLOCK.sub(lambda match: f"\n{convert(match[1], display='block')}\n", markdown)


def on_page_content(content, page, config, files):
    """Replace each formula within a line: in Markdown, a line that begins with MathML would be a paragraph by itself."""
    return INLINE.sub(lambda match: convert(html.unescape(match[1])), content)
