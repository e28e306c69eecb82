"""The style and the one small script of the HTML report. Both are inside the page; nothing is fetched."""

from __future__ import annotations

import base64
import hashlib

# Okabe and Ito's palette, which people with common colour-vision deficiencies tell apart, lightened for dark pages.
_LIGHT = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A6FB0", "#8C8C8C")
_DARK = ("#FF8A3D", "#4DA8E0", "#2EC79B", "#E39CC4", "#F2B93B", "#86CDF5", "#A69BE0", "#A8A8A8")


def _variables(colours: tuple[str, ...]) -> str:
    return "".join(f"--c{number}:{colour};" for number, colour in enumerate(colours))


_CLASSES = "".join(f".c{number}{{--c:var(--c{number})}}" for number in range(len(_LIGHT)))

STYLE = f"""
:root{{color-scheme:light dark;--bg:#fff;--fg:#1c1f23;--dim:#5c6570;--rule:#d9dde2;--card:#f6f7f9;--good:#0a7a4b;
--bad:#b3261e;{_variables(_LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{--bg:#15181c;--fg:#e6e8eb;--dim:#9aa4af;--rule:#343a42;--card:#1d2126;
--good:#4fd39a;--bad:#ff8a80;{_variables(_DARK)}}}}}
{_CLASSES}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:1120px;padding:28px 20px 60px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}}
h1{{font-size:26px;line-height:1.2;margin:0 0 14px;overflow-wrap:anywhere}}
h2{{font-size:18px;margin:34px 0 10px}}
h3{{font-size:14px;margin:0 0 4px}}
p.note{{color:var(--dim);margin:4px 0 10px}}
a{{color:var(--c1)}}
code,.mono{{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:13px}}
.facts{{display:flex;flex-wrap:wrap;gap:10px;margin:0;padding:0}}
.facts div{{max-width:100%;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:8px 14px}}
.facts dt{{color:var(--dim);font-size:12px}}
.facts dd{{margin:0;font-weight:600;overflow-wrap:anywhere}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums}}
th{{text-align:left;color:var(--dim);font-weight:600;font-size:13px}}
th,td{{padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}}
td.num,th.num{{text-align:right;white-space:nowrap}}
td.name{{white-space:nowrap}}
.good{{color:var(--good)}}.bad{{color:var(--bad)}}
details{{margin-top:14px}}summary{{cursor:pointer;color:var(--dim)}}
.charts{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:16px}}
figure{{margin:0;padding:12px 12px 6px;background:var(--card);border:1px solid var(--rule);border-radius:8px}}
figure.wide{{grid-column:1/-1}}
svg{{display:block;width:100%;height:auto}}
svg text{{fill:var(--dim);font:11px system-ui,sans-serif}}
@media (max-width:640px){{figure.wide svg{{overflow:visible}}figure.wide svg text{{font-size:20px}}}}
svg .grid{{stroke:var(--rule);stroke-width:1}}
svg .axis{{stroke:var(--dim);stroke-width:1}}
svg .line{{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round}}
svg .faint{{stroke-width:.9;opacity:.4}}
svg .dot,svg .bar{{fill:var(--c)}}
.legend{{display:flex;flex-wrap:wrap;gap:2px 16px;list-style:none;margin:4px 0;padding:0;font-size:13px}}
.key{{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;background:var(--c)}}
.share{{display:flex;height:22px;border-radius:5px;overflow:hidden;margin:6px 0 10px}}
.share span{{background:var(--c)}}
#filter{{display:flex;flex-wrap:wrap;gap:10px;margin:8px 0 12px}}
#filter[hidden]{{display:none}}
#filter input,#filter select{{font:inherit;color:inherit;background:var(--card);border:1px solid var(--rule);
border-radius:6px;padding:4px 8px}}
#filter input{{flex:1 1 220px}}
.scroll{{overflow-x:auto}}
#samples{{width:100%}}
#samples td.text{{min-width:180px;max-width:420px}}
#samples td.text div{{max-height:9em;overflow:auto;white-space:pre-wrap;overflow-wrap:anywhere}}
@media print{{#filter{{display:none}}#samples td.text div{{max-height:none}}}}
"""

SCRIPT = """
(() => {
  const filter = document.getElementById("filter");
  if (!filter) return;
  const [text, kind, step, reward] = filter.querySelectorAll("input, select");
  const rows = [...document.querySelectorAll("#samples tbody tr")];
  const count = document.getElementById("count");
  const words = rows.map((row) => row.textContent.toLowerCase());
  const show = () => {
    const wanted = text.value.toLowerCase();
    let shown = 0;
    rows.forEach((row, i) => {
      const data = row.dataset;
      row.hidden = !(words[i].includes(wanted) && (!kind.value || data.kind === kind.value) &&
        (!step.value || data.step === step.value) && (!reward.value || data.sign === reward.value));
      shown += row.hidden ? 0 : 1;
    });
    count.textContent = `${shown} of ${rows.length} shown`;
  };
  filter.hidden = false;
  filter.addEventListener("input", show);
  show();
})();
"""


def content_security_policy() -> str:
    """The browser loads nothing and runs no script but ``SCRIPT``, whatever a response holds."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"


def picture_style() -> str:
    """The colours and the rules of what is inside a picture alone, for an SVG file outside of the page."""
    rules = [line for line in STYLE.splitlines() if line.startswith(("svg text{", "svg ."))]
    return STYLE[: STYLE.index("*{box-sizing")] + "\n".join(rules)
