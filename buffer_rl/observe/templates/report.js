(() => {
  for (const button of document.querySelectorAll("[data-copies]")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      // Not navigator.clipboard, which a page from a file may not have.
      const range = document.createRange();
      range.selectNodeContents(document.getElementById(button.dataset.copies));
      const selection = getSelection();
      selection.removeAllRanges();
      selection.addRange(range);
      button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl-C";
    });
  }
  const filter = document.getElementById("filter");
  if (!filter) return;
  const [text, kind, step, reward] = filter.querySelectorAll("input, select");
  const groups = [...document.querySelectorAll("#samples .group")].map((group) => ({
    group,
    asked: group.querySelector(".asked").textContent.toLowerCase(),
    answers: [...group.querySelectorAll(".answer")].map((item) => ({ item, words: item.textContent.toLowerCase() })),
  }));
  const total = groups.reduce((sum, { answers }) => sum + answers.length, 0);
  const count = document.getElementById("count");
  const show = () => {
    const wanted = text.value.toLowerCase();
    let shown = 0;
    for (const { group, asked, answers } of groups) {
      const data = group.dataset;
      const fits = (!kind.value || data.kind === kind.value) && (!step.value || data.step === step.value);
      let left = 0;
      for (const { item, words } of answers) {
        item.hidden = !(fits && (asked.includes(wanted) || words.includes(wanted)) &&
          (!reward.value || item.dataset.level === reward.value));
        left += item.hidden ? 0 : 1;
      }
      group.hidden = !left;
      shown += left;
    }
    count.textContent = `${shown} of ${total} shown`;
  };
  filter.hidden = false;
  filter.addEventListener("input", show);
  show();
})();
