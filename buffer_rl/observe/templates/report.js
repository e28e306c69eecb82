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
