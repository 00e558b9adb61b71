"""The step of a plan as a moving picture: the page's animation as a GIF, for slides and READMEs.

The timeline is drawn once by matplotlib; every frame copies it and adds the cursor and the tiles with Pillow, which
comes with matplotlib.
"""

import bisect
import io
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from memfit.plan.plan import Plan, Treatment
from memfit.report.picture import axis_end, story_to_draw, timeline_figure
from memfit.report.shades import LIGHT
from memfit.report.story import Story
from memfit.report.tiles import State, Tiles
from memfit.units import format_bytes

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

_WIDTH, _TIMELINE_HEIGHT, _DOTS_PER_INCH = 960, 400, 100
_MARGIN, _GAP, _ROW_HEIGHT, _ROWS = 24, 24, 16, 7
_FRAMES, _FRAME_MS, _LAST_MS = 90, 110, 2500
_COLOURS = {
    State.LIVE: LIGHT["activation"],
    State.BACK: LIGHT["again"],
    State.SMALL: LIGHT["output"],
    State.OUT: LIGHT["gradient"],
    State.DONE: LIGHT["grid"],
}

Progress = Callable[[int, int], None]
Box = tuple[float, float, float, float]


def film(plan: Plan, progress: Progress | None = None) -> bytes:
    """The animation of a plan as a GIF; `progress` is told how many frames are drawn."""
    story = story_to_draw(plan)
    studio = _Studio(story, plan)
    count = min(_FRAMES, len(story.planned.moments))
    positions = sorted(
        {round(number * (len(story.planned.moments) - 1) / max(1, count - 1)) for number in range(count)}
    )
    frames = []
    for number, position in enumerate(positions):
        frames.append(studio.frame(position))
        if progress is not None:
            progress(number + 1, len(positions))
    buffer = io.BytesIO()
    durations = [_FRAME_MS] * (len(frames) - 1) + [_LAST_MS]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=False)
    return buffer.getvalue()


class _Studio:
    """What all frames share."""

    def __init__(self, story: Story, plan: Plan) -> None:
        self._story, self._plan = story, plan
        self._tiles = Tiles(story, plan)
        self._width = (_WIDTH - 2 * _MARGIN - _GAP) / 2
        self._boxes = list(lay_out(self._tiles.sizes, self._width))
        rows = max((int(box[1]) for box in self._boxes), default=0) // _ROW_HEIGHT + 1
        self._height = _TIMELINE_HEIGHT + 40 + rows * _ROW_HEIGHT + 44
        self._background, self._plot = self._drawn_timeline()
        self._palette = self._with_swatches(self._background).quantize(255)
        self._font, self._bold = _font(13), _font(17, bold=True)
        self._planned_bytes, self._unplanned_bytes = (
            track.totals(story.values) for track in (story.planned, story.unplanned)
        )

    def frame(self, position: int) -> "Image":
        """The picture at a moment of the planned step."""
        from PIL import Image, ImageDraw

        place = self._story.planned.places[position]
        beside = max(0, bisect.bisect_right(self._story.unplanned.places, place) - 1)
        image = self._background.copy()
        pen = ImageDraw.Draw(image)
        left, top, right, bottom = self._plot
        x = left + (right - left) * (place + 0.5) / axis_end(self._story)
        pen.line([(x, top), (x, bottom)], fill=LIGHT["ink"], width=2)
        second = _MARGIN + self._width + _GAP
        self._side(pen, _MARGIN, "Unplanned", self._unplanned_bytes[beside], self._tiles.unplanned(beside))
        self._side(pen, second, "Planned", self._planned_bytes[position], self._tiles.planned(position, beside))
        self._legend(pen)
        return image.quantize(palette=self._palette, dither=Image.Dither.NONE)

    def _drawn_timeline(self) -> tuple["Image", Box]:
        from PIL import Image

        size = (_WIDTH / _DOTS_PER_INCH, _TIMELINE_HEIGHT / _DOTS_PER_INCH)
        figure = timeline_figure(self._story, self._plan, size)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
        area = figure.axes[0].get_window_extent()
        image = Image.new("RGB", (_WIDTH, self._height), "white")
        with Image.open(buffer) as drawn:
            image.paste(drawn.convert("RGB"), (0, 0))
        return image, (area.x0, _TIMELINE_HEIGHT - area.y1, area.x1, _TIMELINE_HEIGHT - area.y0)

    def _with_swatches(self, image: "Image") -> "Image":
        """A copy with every colour of a tile in it, so that the palette made of it has them."""
        copy = image.copy()
        for number, colour in enumerate([*_COLOURS.values(), LIGHT["line"], LIGHT["ink"], LIGHT["soft"], "#ffffff"]):
            copy.paste(colour, (number * 40, image.height - 30, number * 40 + 40, image.height))
        return copy

    def _side(self, pen: "ImageDraw", left: float, title: str, live_bytes: int, states: Sequence[State]) -> None:
        top = _TIMELINE_HEIGHT + 8
        pen.text((left, top), title, fill=LIGHT["soft"], font=self._font)
        pen.text(
            (left + self._width, top - 3), format_bytes(live_bytes), fill=LIGHT["ink"], font=self._bold, anchor="ra"
        )
        for box, state in zip(self._boxes, states, strict=True):
            moved = (left + box[0], top + 26 + box[1], left + box[2], top + 26 + box[3])
            _paint(pen, moved, state)

    def _legend(self, pen: "ImageDraw") -> None:
        x, y = float(_MARGIN), self._height - 26
        shown = [State.LIVE, State.DROPPED, State.BACK, State.SMALL, State.OUT]
        if not any(fate.treatment is Treatment.MOVED for fate in self._plan.fates):
            shown.remove(State.OUT)
        for state in shown:
            _paint(pen, (x, y, x + 13, y + 12), state)
            pen.text((x + 20, y - 2), str(state), fill=LIGHT["soft"], font=self._font)
            x += 40 + pen.textlength(str(state), font=self._font)


def lay_out(sizes: Sequence[int], width: float) -> Iterator[Box]:
    """Tiles in rows, each as wide as its value is big; left, top, right and bottom."""
    scale = width * _ROWS / max(1, sum(sizes))
    x = y = 0.0
    for size in sizes:
        wide = max(3.0, min(width, size * scale))
        if x and x + wide > width:
            x, y = 0.0, y + _ROW_HEIGHT
        yield x, y, x + wide - 2, y + _ROW_HEIGHT - 3
        x += wide


def _paint(pen: "ImageDraw", box: Box, state: State) -> None:
    left, top, right, bottom = box
    if state is State.WAITING:
        pen.rectangle(box, outline=LIGHT["line"])
    elif state is State.DROPPED:
        pen.rectangle(box, outline=LIGHT["again"])
        middle = (top + bottom) / 2
        pen.line([(left + 2, middle), (max(left + 2, right - 2), middle)], fill=LIGHT["again"])
    elif state in (State.SMALL, State.OUT):
        pen.rectangle(box, outline=_COLOURS[state])
        pen.rectangle((left, bottom - 3, right, bottom), fill=_COLOURS[state])
    else:
        pen.rectangle(box, fill=_COLOURS[state])


def _font(size: int, *, bold: bool = False) -> Any:
    """The font that matplotlib brings along."""
    from matplotlib import font_manager
    from PIL import ImageFont

    properties = font_manager.FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")
    return ImageFont.truetype(font_manager.findfont(properties), size)
