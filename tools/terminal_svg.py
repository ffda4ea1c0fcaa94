#!/usr/bin/env python3
"""Turns a terminal screen with ANSI colours into an SVG picture.

  tmux capture-pane -e -p -t SESSION | tools/terminal_svg.py > docs/run.svg

Understands the SGR sequences that the run's view uses: bold, dim, the 8 and 16 colours, 256 colours, reset.
"""

import html
import re
import sys

PALETTE = ["#45475a", "#f38ba8", "#a6e3a1", "#f9e2af", "#89b4fa", "#cba6f7", "#94e2d5", "#bac2de"]
BRIGHT = ["#6c7086", "#f38ba8", "#a6e3a1", "#f9e2af", "#89b4fa", "#f5c2e7", "#94e2d5", "#ffffff"]
BACKGROUND, FOREGROUND = "#1e1e2e", "#cdd6f4"
CELL_WIDTH, CELL_HEIGHT, FONT = 8.4, 18, 14
SEQUENCE = re.compile(r"\x1b\[([0-9;]*)m")


def colour256(n):
    if n < 8:
        return PALETTE[n]
    if n < 16:
        return BRIGHT[n - 8]
    if n >= 232:
        level = 8 + 10 * (n - 232)
        return f"#{level:02x}{level:02x}{level:02x}"
    n -= 16
    steps = [0, 95, 135, 175, 215, 255]
    return "#%02x%02x%02x" % (steps[n // 36], steps[n // 6 % 6], steps[n % 6])


def apply(style, codes):
    codes = [int(c or 0) for c in codes.split(";")]
    i = 0
    while i < len(codes):
        c = codes[i]
        if c == 0:
            style = {}
        elif c in (1, 2):
            style = {**style, "bold" if c == 1 else "dim": True}
        elif c == 22:
            style = {k: v for k, v in style.items() if k not in ("bold", "dim")}
        elif 30 <= c <= 37:
            style = {**style, "fg": PALETTE[c - 30]}
        elif 90 <= c <= 97:
            style = {**style, "fg": BRIGHT[c - 90]}
        elif c == 39:
            style = {k: v for k, v in style.items() if k != "fg"}
        elif c == 38 and codes[i + 1 : i + 2] == [5]:
            style = {**style, "fg": colour256(codes[i + 2])}
            i += 2
        i += 1
    return style


def runs(line, style):
    at, out = 0, []
    for match in SEQUENCE.finditer(line):
        if match.start() > at:
            out.append((line[at : match.start()], style))
        style = apply(style, match.group(1))
        at = match.end()
    if at < len(line):
        out.append((line[at:], style))
    return out, style


def main():
    lines = [line.rstrip("\n") for line in sys.stdin]
    while lines and not SEQUENCE.sub("", lines[-1]).strip():
        lines.pop()
    columns = max(len(SEQUENCE.sub("", line).rstrip()) for line in lines) + 2
    width, height = columns * CELL_WIDTH + 16, len(lines) * CELL_HEIGHT + 24
    print(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}">')
    print(f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>')
    print(f'<g font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="{FONT}" fill="{FOREGROUND}" xml:space="preserve">')
    style = {}
    for row, line in enumerate(lines):
        parts, style = runs(line, style)
        column = 0
        for text, s in parts:
            x, y = 12 + column * CELL_WIDTH, 12 + (row + 0.75) * CELL_HEIGHT
            column += len(text)
            if not text.strip():
                continue
            extra = f' fill="{s["fg"]}"' if "fg" in s else ""
            extra += ' font-weight="bold"' if s.get("bold") else ""
            extra += ' opacity="0.6"' if s.get("dim") else ""
            print(f'<text x="{x:.1f}" y="{y:.1f}" textLength="{len(text) * CELL_WIDTH:.1f}" lengthAdjust="spacingAndGlyphs"{extra}>{html.escape(text)}</text>')
    print("</g>\n</svg>")


if __name__ == "__main__":
    main()
